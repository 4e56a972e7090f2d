"""Communication rounds as a differentiable function: ``fp.differentiable.rounds``.

A round is a pure function of the start, the run-time values and the weights of the clients. So a
loss after some rounds has a gradient with respect to each of them::

    run  = fp.differentiable.rounds(session, 3)            # three rounds of the session
    loss = fp.differentiable.loss(session, validation)     # mean loss of a state's model

    gradient = jax.grad(lambda leaves: loss(run(leaves)))(run.leaves)

The compiled round of a session loops over a number of time steps that is known at run time only,
and such a loop has no derivative in reverse mode. Here the same round loops over the plan's
capacity and skips the unused steps, and the rounds are a scan. Both loops are checkpointed
(``jax.checkpoint``): the forward pass stores the state before every round; the backward pass
computes a round again, stores the local states at its time steps, and computes the activations of
one time step at a time.

The gradient is exact: it is the derivative of the computed numbers. What an algorithm rounds or
counts (quantized uploads, ranks, a median's choice) has the derivative 0, or that of the choice
that was made. Measurements (norms, errors, the clients' training metrics) have no derivative.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.contracts.aggregator import Integers
from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.types import Params, PyTree
from fedjax_peft.engine.initial import initial_state
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.round import RoundResult
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.setup import Setup
from fedjax_peft.engine.state import RoundInfo, State
from fedjax_peft.engine.with_derivative import (
    differentiable_round,
    loop_with_derivative,
    measured_apart,
)
from fedjax_peft.numerics import summation
from fedjax_peft.numerics.hyperparameters import as_arrays
from fedjax_peft.numerics.random import stream
from fedjax_peft.support.errors import InputError, check_known, nearest

__all__ = ["Plans", "Rounds", "directional", "loss", "rounds"]


class Plans(NamedTuple):
    """The plans of consecutive rounds; a pytree of arrays."""

    plan: Plan
    """The plans, each array with a leading axis ``[rounds, ...]``."""
    round_index: np.ndarray
    """int32 ``[rounds]``."""


class Rounds:
    """A number of rounds as a pure function; made by :func:`rounds`."""

    def __init__(self, session: Session, n: int, *, seed: int, checkpoint: bool):
        """Prepares the rounds; the arguments are those of :func:`rounds`."""
        self._session, self._n, self._seed = session, n, seed
        self._key = stream(seed, "clients")
        # One for all run-time values: a slope by a value compares equal noise.
        self._salt = session.salt(session.values)
        self._loop = partial(loop_with_derivative, checkpoint=checkpoint)
        self._checkpoint = jax.checkpoint if checkpoint else (lambda f, **_: f)
        self._first = self.plans()

    @property
    def leaves(self) -> Params:
        """The initial shared and private leaves of the session, by name."""
        shared, private = self._session.leaves
        return {**shared, **private}

    @property
    def values(self) -> dict[str, Array]:
        """The run-time values of the session, float32 scalars by name."""
        return as_arrays(self._session.values)

    @property
    def weights(self) -> Array:
        """The weights of the clients in the aggregate, float32 ``[rounds, slots]``.

        ``plans().plan.client`` has the clients of the slots. A weight of 0 leaves a client out; if
        clients add noise themselves, it leaves all but the noise out.
        """
        given = jnp.asarray(self._first.plan.weight)
        algorithm = self._session.setup.algorithm
        return given if algorithm.weights == "size" else jnp.where(given > 0, 1.0, 0.0)

    def plans(self, after: int = 0) -> Plans:
        """Returns the plans of the rounds ``after + 1`` to ``after + n``, made on the host.

        They are arrays of the same shapes for every ``after``. A compiled function that takes them
        as an argument is compiled once, and sees other clients and examples in every call.
        """
        indices = range(after + 1, after + 1 + self._n)
        # The last round first: where it needs more room, all plans get it.
        made = [self._session.plan(i, self._seed) for i in reversed(indices)][::-1]
        stacked = jax.tree.map(lambda *x: np.stack(x), *made)
        return Plans(stacked, np.array(indices, np.int32))

    def start(self, leaves: Params | None = None, values: Mapping[str, Any] | None = None) -> State:
        """Returns the state before the first round; the arguments are those of a call."""
        numbers = self._numbers(values)
        setup = self._with_constants(leaves or {}).made(numbers)
        both = self._session.leaves
        shared, private = ({n: (leaves or {}).get(n, x) for n, x in own.items()} for own in both)
        state = initial_state(setup, (shared, private), numbers)
        return state._replace(salt=self._salt, round_index=0, seed=self._seed)

    def __call__(
        self,
        leaves: Params | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        weights: Array | None = None,
        state: State | None = None,
        plans: Plans | None = None,
    ) -> State:
        """Returns the state after the rounds; a pure function of its arguments.

        Args:
          leaves: name -> array, in the place of the model's: shared and private leaves at the
            start, and leaves that never change, fixed (such as LoRA's scale) or frozen. Leaves
            without an entry are the session's. :attr:`leaves` has the initial shared and private
            leaves.
          values: run-time values that replace some of the session's.
          weights: of the clients in the aggregate, ``[rounds, slots]``, not negative; by default
            :attr:`weights`. Most aggregators divide by their sum.
          state: the state to begin with, such as one from ``session.step``; it is not consumed. By
            default :meth:`start`. Given with a state, ``leaves`` are fixed and frozen ones only.
          plans: from :meth:`plans`; by default those of the first rounds.

        Raises:
          InputError: there is no leaf or value of a given name, or an array has a wrong shape.
        """
        return self.with_info(leaves, values=values, weights=weights, state=state, plans=plans)[0]

    def with_info(
        self,
        leaves: Params | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        weights: Array | None = None,
        state: State | None = None,
        plans: Plans | None = None,
    ) -> tuple[State, RoundInfo]:
        """Returns the state after the rounds, and the measurements of all rounds.

        The arguments are those of a call. The measurements are those of ``session.step`` with a
        leading axis ``[rounds, ...]``, and have no derivative. Measurements that cost memory in
        every round, such as the aggregation error of a mean, are left out.
        """
        plans = self._first if plans is None else plans
        if state is None:
            state = self.start(leaves, values)
        else:
            self._check_trained(leaves or {})
            state = state._replace(values={**state.values, **self._chosen(values)})
        given = None if weights is None else self._checked(weights, plans)
        setup = self._with_constants(leaves or {})
        padded = self._session.padded(self._seed)

        def one(state: State, at: tuple) -> tuple[State, RoundResult]:
            plan, index, weight = at
            made = measured_apart(setup.made(state.values), "training", weight is None)
            plan = plan if weight is None else plan._replace(weight=weight)
            result = differentiable_round(made, padded, self._loop, self._session.columns)(
                state, plan, self._key, index
            )
            return result.state, result._replace(state=())  # type: ignore[arg-type]

        inputs = (*jax.tree.map(jnp.asarray, plans), given)
        body = self._checkpoint(one, prevent_cse=False)
        after, found = jax.lax.scan(body, state.on_device(), inputs)
        fields = {name: getattr(found, name) for name in RoundInfo._fields[2:]}
        index: Any = plans.round_index
        info = RoundInfo(index, plans.plan, **fields)
        return after._replace(round_index=plans.round_index[-1], seed=self._seed), info

    def _chosen(self, values: Mapping[str, Any] | None) -> dict[str, Array]:
        """Returns the given run-time values as arrays; raises InputError for an unknown name."""
        for name in values or {}:
            check_known("run-time value", name, self._session.values)
        return {name: jnp.asarray(x, jnp.float32) for name, x in (values or {}).items()}

    def _numbers(self, values: Mapping[str, Any] | None) -> dict[str, Array]:
        return self.values | self._chosen(values)

    def _checked(self, weights: Array, plans: Plans) -> Array:
        weights, shape = jnp.asarray(weights, jnp.float32), plans.plan.weight.shape
        if weights.shape != shape:
            raise InputError(
                f"The weights have the shape {weights.shape}, but these rounds have {shape}: one"
                " weight for each round and slot."
            )
        # A slot without work has no weight, whatever is given for it.
        return jnp.where(plans.plan.client >= 0, weights, 0.0)

    def _check_trained(self, leaves: Params) -> None:
        """Raises InputError for leaves that are part of a given state."""
        both = sorted(set(leaves) & set(self.leaves))
        if both:
            raise InputError(
                f"The leaf {both[0]!r} is part of the state, which was given too. Change it in the"
                " state, or leave the state out."
            )

    def _with_constants(self, leaves: Params) -> Setup:
        """Returns the setup with the given fixed and frozen leaves."""
        return _replaced(self._session.setup, leaves, self.leaves)


def rounds(session: Session, n: int, *, seed: int = 0, checkpoint: bool = True) -> Rounds:
    """Returns ``n`` rounds of a session as a pure, differentiable function.

    The function takes leaves, run-time values or weights, and returns the state after the rounds;
    see :class:`Rounds`. Clients, batches, dropout and noise are those of ``session.step`` from
    ``session.init(seed)``, and the numbers are equal up to float32 rounding. The noise of privacy
    stays the same when ``values`` or ``leaves`` are given.

    Put ``jax.jit`` around the outermost function. The data are constants of its program, and so
    are the frozen weights; give large ones as ``leaves`` to make them arguments.

    With ``checkpoint``, the memory of a gradient is about that of ``n`` states, of the local states
    of the lanes at each time step of one round, and of the activations of one local step. Without
    it, the activations of all local steps of all rounds are stored; it saves the second
    computation of every step.

    Some cases have no finite derivative, and the gradient is then NaN. ``optax.adam`` divides by
    the square root of a mean of squares, whose derivative at 0 is infinite: set ``eps_root``, such
    as ``1e-8``, if a gradient can be exactly 0 (that of LoRA's A is, while B is 0). The factors of
    a truncated product (FRA-LoRA, FlexLoRA) have no derivative where singular values of the average
    are equal, and those of an average of low rank are equal: all 0. That happens after a single
    local step from B = 0. The geometric median divides by distances, which may be 0.

    Args:
      session: the session; its own states are not changed.
      n: the number of rounds.
      seed: the seed of the random numbers in the rounds, as for ``session.init``.
      checkpoint: store states and compute activations again.

    Raises:
      InputError: ``n`` is not positive; the clients' state is not on the device; the rounds are
        asynchronous; or the uploads are summed as integers (secure aggregation), which has no
        derivative.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError(f"n = {n!r} must be a number of rounds, at least 1.")
    if session.client_place != "device":
        raise InputError(
            "Differentiable rounds keep the clients' state on the device. Make the session with"
            ' client_state="device".'
        )
    if session.schedule(seed).timelines is not None:
        raise InputError("Rounds of asynchronous clients are not differentiable yet.")
    _check_real(session)
    return Rounds(session, n, seed=seed, checkpoint=checkpoint)


def loss(
    session: Session,
    data: Any,
    *,
    metric: str = "loss",
    rows: Mapping[int, Sequence[int] | np.ndarray] | None = None,
    batch_size: int = 64,
    checkpoint: bool = True,
) -> Callable[..., Array]:
    """Returns a pure, differentiable function: the mean loss of the models in a state.

    It is the ``loss`` of ``session.evaluate`` with the same data: of the global model; with
    personal models, the mean over the clients. With ``rows``, each client's own model is measured
    on its own rows.

    The returned function takes a state, and optionally the fixed and frozen ``leaves`` that were
    given to the rounds.

    Args:
      session: the session.
      data: the examples, such as a :class:`fedjax_peft.data.Dataset`.
      metric: another differentiable metric of the task in the place of the loss.
      rows: client id -> row numbers of ``data``; the clients count equally.
      batch_size: examples in a step.
      checkpoint: compute the activations of a step again in the backward pass.

    Raises:
      InputError: the task has no such metric.
    """
    data, personal = session.read(data), rows is not None or session.personal
    everything = np.arange(len(data), dtype=np.int32)
    if rows is not None:
        members = [(client, np.asarray(own, np.int32)) for client, own in rows.items()]
    elif personal:
        members = [(client, everything) for client in range(session.setup.clients)]
    else:
        members = session.global_members(len(data))
    evaluator = session.evaluator(data.columns, members, batch_size, personal=personal)
    plan, trained = evaluator.plan, {**session.leaves[0], **session.leaves[1]}
    columns = {name: jnp.asarray(x) for name, x in evaluator.columns.items()}
    loop = partial(loop_with_derivative, checkpoint=checkpoint)
    key = stream(0, "clients")  # of no effect: an evaluation has no random numbers

    def mean(state: State, leaves: Params | None = None) -> Array:
        setup = _replaced(evaluator.setup, leaves or {}, trained).made(state.values)
        made = measured_apart(setup, evaluator.work, True)
        measure = differentiable_round(made, evaluator.padded, loop, columns)
        result = measure(state.on_device(), jax.tree.map(jnp.asarray, plan), key, jnp.int32(0))
        metrics = result.predictions["metrics"]
        if metric not in metrics:
            raise InputError(f"The task has no metric {metric!r}. {nearest(metric, metrics)}")
        total, count = (
            jnp.zeros(len(plan.client)).at[plan.slot].add(x, mode="drop") for x in metrics[metric]
        )
        return jnp.mean(total / count) if personal else jnp.sum(total) / jnp.sum(count)

    return mean


def directional(
    function: Callable[[PyTree], Array], at: PyTree, direction: PyTree, step: float = 1e-2
) -> float:
    """Returns the derivative of a function along a direction, by finite differences.

    It checks gradients: it should be near ``Σ gradient · direction``. The formula is Richardson's,
    ``(4 D(h/2) - D(h)) / 3`` with the central difference ``D(h) = (f(x + h d) - f(x - h d)) / 2h``,
    whose error is of the order h⁴. In float32 the rounding of the function divided by h is added to
    it, so that h should not be much smaller than 0.01 in the unit of the direction.

    Args:
      function: pytree -> scalar.
      at: where the derivative is taken.
      direction: in the structure of ``at``.
      step: h.
    """

    def difference(h: float) -> float:
        ends = [
            float(function(jax.tree.map(lambda x, d, s=s: x + s * h * d, at, direction)))
            for s in (1, -1)
        ]
        return (ends[0] - ends[1]) / (2 * h)

    return (4 * difference(step / 2) - difference(step)) / 3


def _replaced(setup: Setup, leaves: Params, trained: Mapping[str, Any]) -> Setup:
    """Returns the setup with some of its fixed and frozen leaves replaced.

    Raises:
      InputError: a leaf is neither among them nor among the ``trained`` leaves, or has another
        shape.
    """
    known = {**setup.frozen, **setup.fixed, **trained}
    for name, x in leaves.items():
        if name not in known:
            raise InputError(f"The model has no leaf {name!r}. {nearest(name, known)}")
        if jnp.shape(x) != known[name].shape:
            raise InputError(
                f"The leaf {name!r} has the shape {known[name].shape}, not {jnp.shape(x)}."
            )
    frozen, fixed = (
        {n: leaves.get(n, x) for n, x in own.items()} for own in (setup.frozen, setup.fixed)
    )
    return setup._replace(frozen=frozen, fixed=fixed)


def _check_real(session: Session) -> None:
    """Raises InputError for an algorithm whose uploads are summed as integers."""
    algorithm: Algorithm = session.setup.algorithm
    server = jax.eval_shape(algorithm.server.init, session.leaves[0])
    template = jax.eval_shape(algorithm.server.unchanged, server)
    lifted = summation.lifted_shapes(algorithm.aggregator, template, session.setup.fixed)
    parts = jax.tree.leaves(lifted, is_leaf=lambda x: isinstance(x, Integers))
    if any(isinstance(part, Integers) for part in parts):
        raise InputError(
            f"The aggregator {algorithm.aggregator.name!r} sums integers, so the rounds have the"
            " derivative 0. Leave out the mechanism that needs them (secure aggregation)."
        )
