"""The algorithm as a client runs it on its own: its server is what the client has received."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import (
    Aggregated,
    Aggregator,
    Decoded,
    PyTree,
    ServerUpdate,
    Stacked,
    Transform,
    Wire,
)
from fedjax_peft.deploy.wire import leaves_of
from fedjax_peft.engine.setup import Setup
from fedjax_peft.numerics import summation
from fedjax_peft.transforms.packing import is_wire, wires_of

MEASURED = "measured/{}"


def down_form(setup: Setup, shared: PyTree) -> dict[str, PyTree]:
    """Returns the shapes of what the server sends; ``shared`` are the initial shared leaves.

    These are ``broadcast``, ``template``, ``frozen`` (what is added to the frozen leaves),
    ``transform`` (what the server's part of the upload transform broadcasts) and ``aggregator``
    (its state, if clients lift their uploads).
    """

    def form(shared: PyTree) -> dict[str, PyTree]:
        server = setup.algorithm.server.init(shared)
        template = setup.algorithm.server.unchanged(server)
        transform, received = setup.transform, ()
        if transform is not None:
            received = transform.broadcast(transform.init(setup.algorithm.change_part(template)))
        state = setup.algorithm.aggregator.init(template)
        return down(setup, server, setup.algorithm.server.broadcast(server), received, state)

    return jax.eval_shape(form, shared)


def down(
    setup: Setup, server: PyTree, broadcast: PyTree, received: PyTree, state: PyTree
) -> dict[str, PyTree]:
    """Returns what the server sends, see :func:`down_form`.

    Args:
      server: the server's state.
      received: for the upload transform.
      state: of the aggregator.
    """
    rules, lifts = setup.algorithm.server, setup.algorithm.aggregator.randomise is not None
    return {
        "broadcast": broadcast,
        "template": rules.unchanged(server),
        "frozen": {} if rules.frozen_delta is None else rules.frozen_delta(server),
        "transform": received,
        "aggregator": state if lifts else (),
    }


def up_form(setup: Setup, template: PyTree) -> tuple[PyTree, dict[str, Wire]]:
    """Returns the shapes of an upload, and leaf -> what the upload transform says of its size.

    Where clients add noise of their own, they send their uploads lifted.
    """
    algorithm, transform = setup.algorithm, setup.transform
    if algorithm.aggregator.randomise is not None:
        return summation.lifted_shapes(algorithm.aggregator, template, setup.fixed), {}
    if transform is None or transform.wire is None:
        return template, {}
    change, field = algorithm.change_part(template), algorithm.traffic.change_field
    sizes = transform.wire(change, wires_of(change))
    if is_wire(sizes):  # the entries that travel are chosen among all leaves
        return template, {}
    place = "" if field is None else f"{field}/"
    return template, {place + n: w for n, w in leaves_of(sizes, is_leaf=is_wire).items()}


def receiving(setup: Setup) -> Setup:
    """Returns the setup of a round of one client, whose result has the upload in its server state.

    The server's state is a message (``Forms.down``) with the room for the upload, ``upload``.
    """
    algorithm, transform = setup.algorithm, setup.transform
    if transform is not None:
        transform = _received_transform(transform)
    own = algorithm._replace(
        aggregator=_keeping(algorithm.aggregator.unmasked_policy),
        server=_received_server(algorithm.server),
        round_metrics=_no_metrics,
        tuning=None,
    )
    return setup._replace(
        algorithm=own, transform=transform, maker=None, diagnosis=None, total_clients=1
    )


# Equal parts make equal functions, by which compiled programs are found again.
@functools.cache
def _keeping(policy: Any) -> Aggregator:
    """Returns an aggregator of one upload, which stays as it is after all stages."""
    return Aggregator(
        "one upload",
        lift=lambda upload, template, fixed: Stacked(upload),
        finish=lambda total, template, context, state: Aggregated(total.value.value, {}, state),
        unmasked_policy=policy,
    )


def _no_metrics(round_index: Array) -> dict[str, Array]:
    return {}


@functools.cache
def _received_server(rules: ServerUpdate) -> ServerUpdate:
    return ServerUpdate(
        init=lambda shared: shared,
        update=lambda state, upload, context: {**state, "upload": upload},
        broadcast=lambda state: state["broadcast"],
        template=lambda state: state["template"],
        update_norm=rules.update_norm,
        frozen_delta=None if rules.frozen_delta is None else lambda state: state["frozen"],
    )


@functools.cache
def _received_transform(transform: Transform) -> Transform:
    """Returns the client's part of a transform; what it measures becomes metrics of the round."""

    def server(aggregate: Any, state: Any, measured: Any, context: Any) -> Decoded:
        found = enumerate(jax.tree.leaves(measured.values))
        return Decoded({}, state, {MEASURED.format(i): x[0] for i, x in found})

    return transform._replace(
        broadcast=lambda state: state,
        server=server,
        changes_aggregate=False,
        # The server has compressed what it sends, which is where the upload starts from.
        receive=None if transform.receive is None else lambda leaves, state, key: (leaves, {}),
    )


def room_for_upload(template: PyTree) -> PyTree:
    """Returns zeros for the upload of one client, ``[1, ...]``, float32."""
    return jax.tree.map(lambda x: jnp.zeros((1, *x.shape), jnp.float32), template)
