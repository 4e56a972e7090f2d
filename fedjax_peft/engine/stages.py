"""The stages of an upload between the end of its client's work and the sum.

    tamper    what hostile clients send, for example                              (Stages.sent)
    mask      entries outside the client's rank keep their received values
    measure   norm of the change, and the shares of leaves that are sent
    encode    the client's part of the upload transform                           (Transform.client)
    rebase    what an asynchronous server makes of it, for example                (Stages.received)
    zero      the same entries become 0, if the aggregator asks for zeros
    accept    an upload that is not finite is left out, and gets the weight 0; if clients add
              noise themselves, one that learned nothing takes its place

Each is a function of a single upload. Both engines put them together once for a program: the
compiled one maps them over its lanes, the reference engine calls them client by client.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Algorithm, Params, PyTree, Stage, Upload
from fedjax_peft.engine.setup import Setup
from fedjax_peft.engine.start import RoundStart
from fedjax_peft.engine.uploads import as_received, encoder
from fedjax_peft.numerics import tree


def upload_stages(setup: Setup, start: RoundStart) -> tuple[Stage, ...]:
    """Returns the stages of the uploads of a round, in their order."""
    algorithm, transform, aggregator = setup.algorithm, setup.transform, start.aggregator
    zeros = (_zero_unmasked,) if aggregator.unmasked_policy == "zero" else ()
    encode: tuple[Stage, ...] = ()
    if transform is not None:
        encode = (encoder(transform, algorithm, start.received, start.sent_leaves),)
    return (
        *(_of_sent_leaves(stage, start.sent_leaves) for stage in setup.stages.sent),
        _keep_unmasked,
        _measuring(algorithm, start.constants.fixed, zeros),
        *encode,
        *setup.stages.received,
        *zeros,
        _accept if aggregator.randomise is None else _accept_noisy,
    )


def passed(stages: tuple[Stage, ...], upload: Upload) -> Upload:
    """Returns an upload after all stages."""
    for stage in stages:
        upload = stage(upload)
    return upload


def _of_sent_leaves(stage: Stage, sent_leaves: dict[str, Array]) -> Stage:
    """Returns a stage that leaves the leaves as they are that rest in the round."""

    def on_sent(upload: Upload) -> Upload:
        changed = stage(upload)
        return changed._replace(value=as_received(sent_leaves, changed.value, upload.value))

    return on_sent


def _keep_unmasked(upload: Upload) -> Upload:
    """Returns the upload with received values in the entries that its client does not have."""
    client = upload.client
    value = as_received(client.rank_mask, upload.value, client.source.template)
    return upload._replace(value=value)


def _zero_unmasked(upload: Upload) -> Upload:
    """Returns the upload with zeros in the entries that its client does not have."""
    zeros = jax.tree.map(jnp.zeros_like, upload.template)
    return upload._replace(value=as_received(upload.client.rank_mask, upload.value, zeros))


def _measuring(algorithm: Algorithm, fixed: Params, zeros: tuple[Stage, ...]) -> Stage:
    """Returns the stage that measures; shares are those of an upload after the stages ``zeros``."""
    update_norm = algorithm.server.update_norm or partial(distance, algorithm)

    def measure(upload: Upload) -> Upload:
        template = upload.client.source.template
        return upload._replace(
            norm=update_norm(upload.value, template, fixed),
            shares=algorithm.traffic.sent_shares(passed(zeros, upload).value, template),
        )

    return measure


def distance(algorithm: Algorithm, upload: PyTree, template: PyTree, fixed: Params) -> Array:
    """Returns the norm of an upload's change of the leaves (``ServerUpdate.update_norm``)."""
    return tree.distance(algorithm.change_part(upload), algorithm.change_part(template))


def _accept(upload: Upload) -> Upload:
    """Returns the upload if it is finite; otherwise zeros without weight."""
    upload = _checked(upload)
    zeros = jax.tree.map(jnp.zeros_like, upload.value)
    value = tree.where(upload.accepted, upload.value, zeros)
    return upload._replace(value=value, weight=jnp.where(upload.accepted, upload.weight, 0.0))


def _accept_noisy(upload: Upload) -> Upload:
    """Returns the upload if it is finite and has a weight; otherwise one that learned nothing.

    With noise of the clients' own, one that has nothing usable sends a change of 0 and its noise:
    its data decide whether it has, and a missing share of the noise would tell.
    """
    upload = _checked(upload)
    usable = upload.accepted & (upload.weight > 0)
    return upload._replace(value=tree.where(usable, upload.value, upload.template))


def _checked(upload: Upload) -> Upload:
    """Returns the upload with ``finite``, and accepted only if all its numbers are finite."""
    numbers = (upload.value, upload.client_state, upload.memory)
    finite = tree.all_finite(numbers) & upload.finite
    return upload._replace(finite=finite, accepted=finite & upload.accepted)
