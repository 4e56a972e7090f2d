"""A round with a derivative in reverse mode: a loop of fixed length, and measurements apart."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Aggregated, PyTree, RoundContext, Total
from fedjax_peft.engine.local_work import Loop
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.round import RoundOptions, RoundResult, build_round
from fedjax_peft.engine.setup import Setup
from fedjax_peft.engine.stages import distance
from fedjax_peft.engine.state import State
from fedjax_peft.engine.work import Work, at_work


def loop_with_derivative(
    steps: Array, body: Callable[[Array, Any], Any], start: Any, *, capacity: int, checkpoint: bool
) -> Any:
    """Returns the carry after ``steps`` of ``capacity`` time steps, by a loop with a derivative."""

    def step(carry: Any, t: Array) -> tuple[Any, None]:
        return jax.lax.cond(t < steps, body, lambda t, carry: carry, t, carry), None

    one = jax.checkpoint(step, prevent_cse=False) if checkpoint else step
    return jax.lax.scan(one, start, jnp.arange(capacity))[0]


def differentiable_round(
    setup: Setup, padded: tuple[int, ...], loop: Callable[..., Any], columns: Mapping[str, Any]
) -> Callable[..., RoundResult]:
    """Returns (state, plan, key, round) -> result of the round, with a loop of fixed length."""

    def run(state: State, plan: Plan, key: Array, index: Array) -> RoundResult:
        fixed_length: Loop = partial(loop, capacity=plan.slot.shape[0])
        made = build_round(setup, RoundOptions(padded, loop=fixed_length))
        weights = (setup.frozen, setup.fixed, setup.rank_mask or {}, dict(columns))
        return made(*weights, state, plan, key, index)

    return run


def measured_apart(setup: Setup, work: Work, own_weights: bool) -> Setup:
    """Returns the setup for this work, with measurements that have no derivative.

    The norm of a change has an infinite derivative at 0, and 0 times infinity is not 0.

    Args:
      own_weights: whether the algorithm weights the clients; else the plan's weights are used.
    """
    algorithm = setup.algorithm
    aggregator = algorithm.aggregator.unmeasured or algorithm.aggregator
    finish, norm = aggregator.finish, algorithm.server.update_norm or partial(distance, algorithm)

    def finished(
        total: Total, template: PyTree, context: RoundContext, state: PyTree
    ) -> Aggregated:
        result = finish(total, template, context, state)
        return result._replace(metrics=jax.lax.stop_gradient(result.metrics))

    algorithm = algorithm._replace(
        aggregator=aggregator._replace(finish=finished),
        server=algorithm.server._replace(
            update_norm=lambda *arguments: norm(*jax.lax.stop_gradient(arguments)), measure=None
        ),
        weights=algorithm.weights if own_weights else "size",
    )
    return at_work(setup._replace(algorithm=algorithm, diagnosis=None, probe=None), work)
