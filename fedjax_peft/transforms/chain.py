"""Several upload transforms, one after the other."""

from collections.abc import Mapping

import jax

from fedjax_peft.display import show
from fedjax_peft.errors import InputError
from fedjax_peft.random import stream
from fedjax_peft.typing import (
    Decoded,
    Encoded,
    Key,
    Measurements,
    PyTree,
    RoundContext,
    Transform,
)

__all__ = ["chain"]


def chain(*transforms: Transform) -> Transform:
    """Returns the transform that applies several transforms in turn.

    The clients' parts run in the given order, the servers' parts in the reverse order, so that the
    last encoding is decoded first. Each transform has its own state, memory and random numbers:
    those of the transform at place ``i`` come from ``fold_in(key, i)``.

    Args:
      *transforms: in the order in which a client applies them.

    Raises:
      InputError: something that is not a transform.
    """
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise InputError(_not_a_transform(transform))

    def client(update: PyTree, memory: PyTree, received: PyTree, key: Key) -> Encoded:
        memories, measured = [], []
        for i, transform in enumerate(transforms):
            own = jax.random.fold_in(key, i)
            encoded = transform.client(update, memory[i], received[i], own)
            update = encoded.update
            memories.append(encoded.memory)
            measured.append(encoded.measured)
        return Encoded(update, tuple(memories), tuple(measured))

    def server(
        aggregate: PyTree, state: PyTree, measured: Measurements, context: RoundContext
    ) -> Decoded:
        states, key = list(state), stream(context.key, "transform")
        metrics: list[dict[str, jax.Array]] = []
        for i, transform in reversed([*enumerate(transforms)]):
            metrics.append({})
            if transform.server is None:
                continue
            own = measured._replace(values=measured.values[i])
            place = context._replace(key=jax.random.fold_in(key, i))
            given = aggregate if transform.changes_aggregate else {}
            decoded = transform.server(given, state[i], own, place)
            states[i], metrics[-1] = decoded.state, decoded.metrics
            if transform.changes_aggregate:
                aggregate = decoded.aggregate
        return Decoded(aggregate, tuple(states), _joined(metrics[::-1]))

    def nbytes(template: PyTree, sizes: Mapping[str, int]) -> Mapping[str, int]:
        for transform in transforms:
            if transform.nbytes is not None:
                sizes = transform.nbytes(template, sizes)
        return sizes

    return Transform(
        name=", ".join(transform.name for transform in transforms),
        client=client,
        init=lambda template: tuple(t.init(template) for t in transforms),
        broadcast=lambda state: tuple(
            t.broadcast(own) for t, own in zip(transforms, state, strict=True)
        ),
        memory=lambda template: tuple(t.memory(template) for t in transforms),
        server=server if any(t.server is not None for t in transforms) else None,
        changes_aggregate=any(t.changes_aggregate for t in transforms),
        nbytes=nbytes if any(t.nbytes is not None for t in transforms) else None,
    )


def _joined(metrics: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """Returns all metrics; a name that occurs again gets its transform's place, from 1."""
    joined: dict[str, jax.Array] = {}
    for place, own in enumerate(metrics, 1):
        joined |= {f"{name}_{place}" if name in joined else name: x for name, x in own.items()}
    return joined


def _not_a_transform(value: object) -> str:
    if isinstance(value, str):
        advice = f"Give the object and not its name, such as fp.transforms.{value}(...)."
    elif callable(value):
        advice = f"Call it: {getattr(value, '__name__', 'the function')}(...)."
    else:
        advice = "Give one such as fp.transforms.clip_norm(1.0)."
    return f"The upload transform {show(value)} is not a transform. {advice}"
