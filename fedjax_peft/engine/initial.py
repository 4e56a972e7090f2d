"""The state before the first round."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Params
from fedjax_peft.engine.gathered import split_memory, with_rows
from fedjax_peft.engine.setup import Setup
from fedjax_peft.engine.state import State
from fedjax_peft.engine.stores.client_records import ClientRow
from fedjax_peft.engine.uploads import start_transform
from fedjax_peft.numerics import summation


def initial_state(
    setup: Setup, leaves: tuple[Params, Params], values: Mapping[str, Array]
) -> State:
    """Returns the state before the first round, without the host's integers; a pure function.

    Args:
      setup: made for the values (:meth:`fedjax_peft.engine.setup.Setup.made`).
      leaves: the initial shared leaves, and the initial private leaves of every client.
    """
    state, row = without_clients(setup, leaves)
    repeat = partial(setup.layout.repeat_for_clients, clients=setup.clients)
    return with_rows(state, ClientRow(*map(repeat, row)))._replace(values=values).on_device()


def without_clients(setup: Setup, leaves: tuple[Params, Params]) -> tuple[State, ClientRow]:
    """Returns the state before the first round without clients, and what one client keeps."""
    shared, private = leaves
    # Copies, because a step consumes its state, but the model's arrays must stay valid.
    server = jax.tree.map(jnp.copy, setup.algorithm.server.init(shared))
    template = setup.algorithm.server.unchanged(server)
    aggregator = jax.tree.map(jnp.array, setup.algorithm.aggregator.init(template))
    transform = start_transform(setup.transform, setup.algorithm, server)
    state, memory = split_memory(State(server, (), aggregator, transform))
    return state, ClientRow(setup.algorithm.init_client_state(shared, private), memory)


def check_shapes(setup: Setup, shared: Params) -> None:
    """Raises InputError for leaves that the aggregator or the server cannot combine.

    Only shapes are computed, so the error is raised before anything is written or compiled.
    """
    aggregator, rules = setup.algorithm.aggregator, setup.algorithm.server
    server = jax.eval_shape(rules.init, shared)
    jax.eval_shape(
        lambda s, f: summation.empty(aggregator, rules.unchanged(s), f, 1), server, setup.fixed
    )
    jax.eval_shape(rules.merge_into_frozen, server, setup.frozen)
