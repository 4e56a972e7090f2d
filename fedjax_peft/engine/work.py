"""What the clients of a round do: they train, or they only measure; and the algorithm for it."""

from collections.abc import Callable
from typing import Any, Literal

import jax

from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Stacked
from fedjax_peft.contracts.algorithm import Algorithm, Traffic
from fedjax_peft.contracts.client import ClientContext, ClientUpdate, Probe
from fedjax_peft.contracts.types import Key, PyTree
from fedjax_peft.contracts.upload import Stages
from fedjax_peft.engine.returned import checked_server
from fedjax_peft.engine.setup import Setup
from fedjax_peft.support.errors import InputError

PREDICTIONS = "predictions"
"""The optional entry of a step's metrics that holds arrays ``[batch, ...]``. These arrays are
stored for every step; all other metrics are summed."""


Work = Literal["training", "tuning", "uploads", "personal", "global", "local"]
"""What the clients of a round do. ``training``: train and send. ``tuning``: train their client
state only. ``uploads``: train, and the server's state becomes the uploads, ``[slots, ...]``.
``personal``: measure their own models. ``global``: measure the global model. ``local``: measure
their models before the aggregation, from the client state (upload, client state)."""


def at_work(setup: Setup, work: Work) -> Setup:
    """Returns the setup with clients that do the given kind of work.

    Outside of training, nothing happens to uploads on their way, so that they are the clients' own
    models; and nothing is measured of the server.
    """
    if work == "training":
        return setup._replace(algorithm=checked_server(setup.algorithm))
    algorithm = _at_work(setup.algorithm, work, setup.probe)
    return setup._replace(algorithm=algorithm, stages=Stages(), transform=None, diagnosis=None)


def check_local_models(setup: Setup, server: PyTree) -> None:
    """Raises InputError if it is not known which models clients have before the aggregation."""
    algorithm, transform = setup.algorithm, setup.transform
    if transform is not None and transform.receive is not None:
        raise InputError(
            f"The upload transform {transform.name!r} compresses what the server broadcasts, and"
            " the clients' models before the aggregation would be trained from leaves that no"
            ' client receives. Leave diagnostics=["local"], or the compressed broadcast, out.'
        )
    rules = algorithm.server
    forms = [jax.eval_shape(form, server) for form in (rules.broadcast, rules.unchanged)]
    if algorithm.local_model is None and forms[0] != forms[1]:
        raise InputError(
            f"The uploads of {algorithm.name!r} have another form than its broadcast. So they do"
            " not say which model a client has before the aggregation. Give the algorithm a"
            " local_model."
        )


def _at_work(algorithm: Algorithm, work: Work, probe: Probe | None) -> Algorithm:
    if work == "tuning":
        return tuning(algorithm)
    if work == "uploads":
        return keeping_uploads(algorithm)
    if work == "local":
        before = algorithm.before_aggregation
        algorithm = algorithm._replace(model=lambda broadcast, sent: before(broadcast, *sent))
    return evaluation(algorithm, personal=work != "global", probe=probe)


def evaluation(algorithm: Algorithm, *, personal: bool, probe: Probe | None = None) -> Algorithm:
    """Returns the algorithm with clients that only measure.

    Its round changes neither the server nor the client state. ``RoundResult.predictions`` has two
    entries: ``metrics``, the metrics of every step, and ``predictions``, the model outputs from
    which the task's score is computed.

    Args:
      personal: True measures each client's own model; False measures the global model, to which all
        leaves then belong.
    """

    def client(context: ClientContext) -> ClientUpdate:
        def step(state: Any, batch: Any, key: Key) -> tuple[Any, Any]:
            broadcast, kept = state
            leaves = algorithm.model(broadcast, kept) if personal else broadcast
            outputs = context.apply(leaves, batch, None, False)
            metrics: dict[str, Any] = dict(context.task.metrics(outputs, batch))
            if probe is not None:
                metrics |= probe(context, leaves, batch)
            predict = context.task.predict
            predictions = {} if predict is None else predict(outputs, batch)
            # A user's task may have no `generate`.
            if (generate := getattr(context.task, "generate", None)) is not None:
                predictions = predictions | generate(
                    lambda columns: context.apply(leaves, columns, None, False), batch
                )
            return state, {PREDICTIONS: {"metrics": metrics, "predictions": predictions}}

        return ClientUpdate(
            init=lambda broadcast, client_state, key: (broadcast, client_state),
            step=step,
            final=lambda state: ({}, state[1]),
        )

    return _sending_nothing(algorithm, client, personal=personal)


def tuning(algorithm: Algorithm) -> Algorithm:
    """Returns the algorithm with clients that train as ``algorithm.tuning`` says and send nothing.

    Its round changes the client state only; the server stays as it is.
    """
    assert algorithm.tuning is not None
    return _sending_nothing(algorithm, algorithm.tuning.client, personal=True)


def keeping_uploads(algorithm: Algorithm) -> Algorithm:
    """Returns the algorithm with a server whose state becomes the uploads, ``[slots, ...]``.

    The local work is that of the algorithm. A client whose upload is not finite has zeros.
    """
    keep = Aggregator(
        "uploads",
        lift=lambda upload, template, fixed: Stacked(upload),
        finish=lambda total, template, context, state: Aggregated(total.value.value, {}, state),
    )
    server = algorithm.server._replace(
        update=lambda state, uploads, context: uploads, measure=None, metrics=None
    )
    return algorithm._replace(aggregator=keep, server=server)


def _sending_nothing(
    algorithm: Algorithm, client: Callable[[ClientContext], ClientUpdate], *, personal: bool
) -> Algorithm:
    """Returns the algorithm with another client update and a server that never changes.

    If ``personal``, clients receive the broadcast; otherwise the leaves of the global model.
    """
    nothing = Aggregator(
        "none",
        lift=lambda upload, template, fixed: (),
        finish=lambda total, template, context, state: Aggregated(template, {}, state),
    )
    still = algorithm.server._replace(
        update_norm=None,
        measure=None,
        update=lambda state, update, context: state,
        broadcast=algorithm.server.broadcast if personal else algorithm.server.model,
        template=lambda state: {},
        metrics=None,
    )
    return algorithm._replace(
        client=client,
        aggregator=nothing,
        server=still,
        traffic=Traffic(),
        round_metrics=lambda round_index: {},
    )
