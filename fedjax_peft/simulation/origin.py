"""A new run that starts from another one: from its model and what its clients and server keep.

The leaves in which the model of a run differs from its base are written to the new run's directory,
so that it can be loaded and resumed without the other one. What clients and server keep is in the
new run's first checkpoint.
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from fedjax_peft.contracts import PyTree
from fedjax_peft.engine.gathered import split_memory, with_rows
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import KEPT, State
from fedjax_peft.engine.stores.client_records import ClientRow
from fedjax_peft.engine.stores.client_store import StoredClients
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import tree
from fedjax_peft.simulation.client_models import check_here
from fedjax_peft.simulation.rows import Row, seen_clients
from fedjax_peft.simulation.run import Run
from fedjax_peft.simulation.storage.record import read_config
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file

ORIGIN = "origin.safetensors"
_TOGETHER = 256
"""Clients whose states are copied at the same time."""


def origin_text(run: Run) -> str:
    """Returns where a run is: its directory, or its algorithm and rounds."""
    return repr(run) if run.out is None else str(run.out.resolve())


def check_start(model: Model, run: Run) -> None:
    """Raises InputError if a model is not that of a run after its rounds."""
    for name, x in run.trained.trainable.items():
        mine = model.trainable.get(name)
        if mine is not x and (mine is None or not np.array_equal(mine, x)):
            raise InputError(
                f"origin needs the run's model: fp.simulate(run.trained, ...,"
                f" records=fp.Records(origin=run)). {name!r}"
                " differs from it."
            )


def not_counted(run: Run) -> str:
    """Returns what a private run says of the run that it starts from."""
    return (
        f"The run starts from {origin_text(run)}, and ε counts its own rounds only. That run gives"
        f" {run.privacy or 'no guarantee of differential privacy.'}"
    )


def save_origin(directory: Path, run: Run) -> None:
    """Writes the leaves in which a run's model differs from its base.

    Args:
      directory: the directory of the new run; a file that is there already stays.
    """
    if (directory / ORIGIN).exists():
        return
    seed = None if run.out is None else base_seed(run.out, read_config(run.out))
    model = run.trained
    leaves = {**model.trainable, **tree.select(model.frozen, sorted(model.wide))}
    arrays = {name: np.asarray(x) for name, x in leaves.items()}
    metadata = {"seed": json.dumps(seed)}
    replace_file(directory / ORIGIN, safetensors.numpy.save(arrays, metadata))


def with_origin(model: Model, directory: Path) -> Model:
    """Returns the base model of a run with the leaves of its origin; without one, the base model.

    Raises:
      InputError: the file is damaged, or of another model.
    """
    path = directory / ORIGIN
    if not path.exists():
        return model
    try:
        with safe_open(path, framework="flax") as file:
            leaves = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}.") from None
    known = {**model.frozen, **model.trainable}
    for name in [*leaves, *model.trainable]:
        if name not in known or name not in leaves or known[name].shape != leaves[name].shape:
            raise InputError(f"{path} is of another model: {name!r} does not fit.")
    moved = {name: x for name, x in leaves.items() if name in model.frozen}
    return model.replace(
        trainable=tree.select(leaves, model.trainable),
        frozen={**model.frozen, **moved},
        wide=model.wide | moved.keys(),
    )


def base_seed(directory: Path, config: Mapping[str, Any]) -> int:
    """Returns the seed that made the base model of a config's run: its own, or its origin's."""
    path = directory / ORIGIN
    if not path.exists():
        return int(config.get("seed", 0))
    try:
        with safe_open(path, framework="flax") as file:
            return int(json.loads(file.metadata()["seed"]) or 0)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged: {error}.") from None


def carried(session: Session, state: State, run: Run) -> tuple[State, Row]:
    """Returns the state before the first round with what a run keeps, and the fields of row 0.

    Each part of ``KEPT`` is taken over whole if the new run keeps the same. What clients keep
    (private leaves, control variates, optimizers) must be the same. The server's state begins anew
    if one of the two servers adds to frozen leaves: ``run.trained`` has these sums already. So does
    the history of an asynchronous server, whose clients at work are lost.

    Args:
      session: of the new run, whose model is ``run.trained``.
      state: the state before its first round, with its clients in their place.

    Returns:
      The state, and ``origin``: the run and its last round; ``seen``, its clients that have trained
      and begin with what they kept; and the names of what begins anew: always ``rounds``, the count
      on which schedules and random numbers depend.

    Raises:
      InputError: the clients of the run keep something else than those of the new one.
    """
    state, anew = _with_shared(session, session.trimmed(state), run)
    theirs = _rows_of(run.client_state, run.kept.get("transform_state", ()))
    mine = _rows_of(state.client_state, state.transform_state)
    old, new = (_of_part(rows.shapes, "client_state") for rows in (theirs, mine))
    if new:
        check_here(run.out)
    if old and (theirs.clients, old) != (mine.clients, new):
        keep, now = (", ".join(n.partition(".")[2] for n in x) or "nothing" for x in (old, new))
        raise InputError(
            f"The {theirs.clients} clients of {origin_text(run)} keep {keep}, and the"
            f" {session.setup.clients} of this run {now}. Take the algorithm, the roles and the"
            " number of clients of that run, or start from its global model only, in Python with"
            " fp.simulate(run.trained, ...) without origin."
        )
    same = theirs == mine._replace(take=theirs.take)
    if not same and _of_part(theirs.shapes, "memory"):
        anew.append("transform_state.memory")
    wanted = {*theirs.shapes} if same else {*old}
    seen = sorted(seen_clients(run.metrics))
    if old != new or max(seen, default=0) >= session.setup.clients:
        seen = []  # what they keep has its initial values, or they are other clients
    done = run.metrics[-1]["round"] if run.metrics else 0
    row = {"origin": {"run": origin_text(run), "round": done, "seen": seen, "anew": anew}}
    return session.placed(_with_clients(state, theirs, wanted)), row


def _with_shared(session: Session, state: State, run: Run) -> tuple[State, list[str]]:
    """Returns the state with what server, aggregator and transforms of a run keep; see above."""
    theirs = _named({"server": run.server, **run.kept})
    mine, anew = _named(state), ["rounds"]
    taken: dict[str, Any] = {}
    algorithm = session.setup.algorithm
    sums = (run.algorithm.server.frozen_delta, algorithm.server.frozen_delta)
    for part in _SHARED:
        old, new = (_of_part(named, part) for named in (theirs, mine))
        begins = part == "history" or (part == "server" and sums != (None, None))
        if not begins and _shapes(old) == _shapes(new):
            taken |= old
        elif old:
            anew.append(part)
    made = _replaced(state, {name: jnp.array(x) for name, x in taken.items()})
    carry = algorithm.aggregator.carry(made.aggregator_state, state.aggregator_state)
    before = _of_part(_named(made), "aggregator_state")
    parts = [n for n, x in _named({"aggregator_state": carry}).items() if x is not before[n]]
    anew += dict.fromkeys(".".join(name.split(".")[:2]) for name in parts)
    return made._replace(aggregator_state=carry), anew


_SHARED = tuple(
    "transform_state.server" if name == "transform_state" else name
    for name in KEPT
    if name != "client_state"
)
"""The parts of a state that are not of single clients."""


class _Rows(NamedTuple):
    """What the clients of a run keep."""

    clients: int
    shapes: dict[str, tuple[tuple[int, ...], str]]
    """Name of a leaf of :class:`ClientRow` -> shape and dtype of one client's."""
    take: Callable[[np.ndarray], dict[str, np.ndarray]]
    """Clients -> the leaves of their rows, ``[n, ...]``."""


def _rows_of(client_state: PyTree, transform_state: Any) -> _Rows:
    """Returns what clients keep, from fields of ``State`` or of a checkpoint."""
    if isinstance(client_state, StoredClients):
        places = client_state.store.packing
        facts = zip(places.names, places.shapes, map(str, places.dtypes), strict=True)
        shapes = {name: (shape, dtype) for name, shape, dtype in facts}
        return _Rows(len(client_state), shapes, client_state.named)
    read = isinstance(transform_state, Mapping)
    memory = transform_state.get("memory", ()) if read else getattr(transform_state, "memory", ())
    arrays = _named(ClientRow(client_state, memory))
    shapes = {name: (shape[1:], dtype) for name, (shape, dtype) in _shapes(arrays).items()}
    clients = next((len(x) for x in arrays.values()), 0)
    return _Rows(clients, shapes, lambda ids: {n: np.asarray(x)[ids] for n, x in arrays.items()})


def _with_clients(state: State, rows: _Rows, wanted: Collection[str]) -> State:
    """Returns a state whose clients keep these leaves of the rows of another run."""
    if not wanted:
        return state
    everyone, kept = np.arange(rows.clients), state.client_state

    def replaced(own: ClientRow, clients: np.ndarray) -> ClientRow:
        return _replaced(own, tree.select(rows.take(clients), wanted))

    if not isinstance(kept, StoredClients):
        _, memory = split_memory(state)
        return with_rows(state, replaced(ClientRow(kept, memory), everyone))
    for ids in np.array_split(everyone, -(-rows.clients // _TOGETHER)):
        kept.put(ids, replaced(kept.take(ids), ids))
    return state


def _named(kept: PyTree) -> dict[str, Any]:
    """Returns name of a leaf -> leaf."""
    named = jax.tree.leaves_with_path(kept)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in named}


def _replaced(kept: Any, leaves: Mapping[str, Any]) -> Any:
    """Returns a tree with other leaves of these names."""
    values = [leaves.get(name, x) for name, x in _named(kept).items()]
    return jax.tree.unflatten(jax.tree.structure(kept), values)


def _of_part(leaves: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Returns the leaves of a part of a tree."""
    return {n: x for n, x in leaves.items() if n == part or n.startswith(f"{part}.")}


def _shapes(leaves: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns name of a leaf -> shape and dtype."""
    return {name: (np.shape(x), str(x.dtype)) for name, x in leaves.items()}
