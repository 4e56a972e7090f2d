"""Several upload transforms, one after the other."""

from typing import NamedTuple

import jax
from jax import Array

from fedjax_peft.contracts.part import part
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.transform import Decoded, Encoded, Measurements, Transform, Wire
from fedjax_peft.contracts.types import Key, PyTree
from fedjax_peft.numerics.forms import check_form, check_type
from fedjax_peft.numerics.random import stream
from fedjax_peft.support.errors import InputError
from fedjax_peft.transforms.packing import all_entries, pack, wires_of


@part
def chain(*transforms: Transform) -> Transform:
    """Returns the transform that applies several transforms in turn.

    The clients' parts run in the given order, the servers' parts in the reverse order, so that the
    last encoding is decoded first. Each transform has its own state, memory and random numbers:
    those of the transform at place ``i`` come from ``fold_in(key, i)``.

    A compressor after one that sends only some entries encodes these entries and no others: in
    ``chain(top_k(0.1), quantize(bits=8))`` the quantiser sees the chosen tenth of each leaf, as an
    array, and computes its scales from that.

    Raises:
      InputError: a compressor after one that must be last.
    """
    _check(transforms)

    def client(update: PyTree, memory: PyTree, received: PyTree, key: Key) -> Encoded:
        done: list[Encoded] = []
        for i, stage in enumerate(_stages(transforms, update)):
            own = jax.random.fold_in(key, i)
            given, back = pack(update, stage.sent) if stage.packs else (update, None)
            encoded = stage.transform.client(given, memory[i], received[i], own)
            _check_encoded(stage.transform, encoded, given, memory[i])
            update = encoded.update if back is None else back(encoded.update)
            done.append(encoded)
        return Encoded(update, tuple(x.memory for x in done), tuple(x.measured for x in done))

    def wire(template: PyTree, wires: PyTree) -> PyTree:
        return _stages(transforms, template, wires)[-1].wires

    down = _downlink(transforms)

    def receive(leaves: PyTree, state: PyTree, key: Key) -> tuple[PyTree, dict[str, Array]]:
        (i,) = down
        one = transforms[i].receive
        assert one is not None
        return one(leaves, state[i], jax.random.fold_in(key, i))

    return Transform(
        name=", ".join(transform.name for transform in transforms),
        client=client,
        init=lambda template: tuple(
            s.transform.init(s.given) for s in _stages(transforms, template)
        ),
        broadcast=lambda state: tuple(
            t.broadcast(own) for t, own in zip(transforms, state, strict=True)
        ),
        memory=lambda template: tuple(
            s.transform.memory(s.given) for s in _stages(transforms, template)
        ),
        server=_Servers(transforms) if any(t.server is not None for t in transforms) else None,
        changes_aggregate=any(t.changes_aggregate for t in transforms),
        wire=wire if any(t.wire is not None for t in transforms) else None,
        final=any(t.final for t in transforms),
        receive=receive if down else None,
        down_wire=transforms[down[0]].down_wire if down else None,
    )


class _Servers:
    """The servers' parts of a chain as one, a :class:`TransformServer`."""

    def __init__(self, transforms: tuple[Transform, ...]):
        self.transforms = transforms

    def __call__(
        self, aggregate: PyTree, state: PyTree, measured: Measurements, context: RoundContext
    ) -> Decoded:
        """Returns the aggregate after all parts, all states and all metrics."""
        states, key = list(state), stream(context.key, "transform")
        metrics: list[dict[str, Array]] = [{} for _ in self.transforms]
        for i, transform in reversed([*enumerate(self.transforms)]):
            if transform.server is None:
                continue
            own = measured._replace(values=measured.values[i])
            place = context._replace(key=jax.random.fold_in(key, i))
            given = aggregate if transform.changes_aggregate else {}
            decoded = transform.server(given, state[i], own, place)
            _check_decoded(transform, decoded, given, state[i])
            states[i], metrics[i] = decoded.state, decoded.metrics
            aggregate = decoded.aggregate if transform.changes_aggregate else aggregate
        return Decoded(aggregate, tuple(states), _joined(metrics))


def tells_clients(transform: Transform, state: PyTree) -> str | None:
    """Returns the name of a transform that may send clients what it has measured of others.

    Its server's part can put measurements into its state, and clients receive of the state. None:
    neither the transform nor one of its chain does both.

    Args:
      state: of the transform; shapes are enough.
    """
    if isinstance(transform.server, _Servers):
        parts = zip(transform.server.transforms, state, strict=True)
        return next((found for one in parts if (found := tells_clients(*one))), None)
    used = state if transform.receive is not None else jax.eval_shape(transform.broadcast, state)
    return transform.name if transform.server is not None and jax.tree.leaves(used) else None


class _Stage(NamedTuple):
    """One transform of a chain, and what it is given."""

    transform: Transform
    given: PyTree
    """Shapes and dtypes."""
    packs: bool
    """Whether it is given the entries that travel, as arrays, instead of the whole change."""
    sent: PyTree
    """The wires before it."""
    wires: PyTree
    """The wires after it."""


def _stages(
    transforms: tuple[Transform, ...], template: PyTree, wires: PyTree = None
) -> list[_Stage]:
    """Returns what each transform of a chain is given."""
    made, wires = [], wires_of(template) if wires is None else wires
    for transform in transforms:
        if transform.wire is not None and transform.changes_aggregate:
            wires = all_entries(template, wires)  # the server's part is given all of them
        packs = transform.wire is not None and all_entries(template, wires) is not wires
        if packs and transform.receive is not None:
            raise InputError(f"{transform.name!r} must be the first transform of a chain.")
        given = jax.eval_shape(lambda x, w=wires: pack(x, w)[0], template) if packs else template
        sent = wires
        if transform.wire is not None:
            wires = transform.wire(given, wires)
            _check_wires(transform.name, wires)
        made.append(_Stage(transform, given, packs, sent, wires))
    return made


def _check_wires(name: str, wires: PyTree) -> None:
    for wire in jax.tree.leaves(wires, is_leaf=lambda x: isinstance(x, Wire)):
        check_type(f"The function `wire` of {name!r}, for each leaf,", wire, Wire)


def _downlink(transforms: tuple[Transform, ...]) -> list[int]:
    """Returns the place of the transform that changes what clients receive, if there is one."""
    down = [i for i, transform in enumerate(transforms) if transform.receive is not None]
    if len(down) > 1:
        names = " and ".join(repr(transforms[i].name) for i in down)
        raise InputError(
            f"Only one transform can change what clients receive, not {names}. Give"
            " fp.transforms.downlink a chain of compressors."
        )
    return down


def _check(transforms: tuple[Transform, ...]) -> None:
    """Raises InputError for a transform that cannot encode what the one before sends."""
    last = None
    for transform in transforms:
        if last is not None and transform.wire is not None:
            raise InputError(
                f"The upload transform {transform.name!r} cannot follow {last!r}, which does not"
                f" send entries of the change. Put {last!r} last, or use one of the two."
            )
        last = transform.name if transform.final else last


def _check_encoded(transform: Transform, encoded: Encoded, given: PyTree, memory: PyTree) -> None:
    what = f"The client's part of the upload transform {transform.name!r}"
    check_type(what, encoded, Encoded)
    check_form(f"{what} must return a change of the form that it is given", encoded.update, given)
    check_form(f"{what} must keep what Transform.memory begins with", encoded.memory, memory)


def _check_decoded(transform: Transform, decoded: Decoded, given: PyTree, state: PyTree) -> None:
    what = f"The server's part of the upload transform {transform.name!r}"
    check_type(what, decoded, Decoded)
    what += " must return {} of the form that it is given"
    check_form(what.format("an aggregate"), decoded.aggregate, given)
    check_form(what.format("a state"), decoded.state, state, dtypes=True)


def _joined(metrics: list[dict[str, Array]]) -> dict[str, Array]:
    """Returns all metrics; a name that occurs again gets its transform's place, from 1."""
    joined: dict[str, Array] = {}
    for place, own in enumerate(metrics, 1):
        joined |= {f"{name}_{place}" if name in joined else name: x for name, x in own.items()}
    return joined
