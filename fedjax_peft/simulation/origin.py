"""A new run that starts from another one: from its model and what its clients and server keep.

The leaves in which the model of a run differs from its base are written to the new run's directory,
so that it can be loaded and resumed without the other one. What clients and server keep is in the
new run's first checkpoint.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from fedjax_peft.contracts import PyTree
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import State
from fedjax_peft.engine.stores.client_records import ClientRow
from fedjax_peft.engine.stores.client_store import StoredClients, client_count, client_rows
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import tree
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


def origin_row(run: Run) -> Row:
    """Returns the field ``origin`` of row 0 of a run that starts from another one."""
    done = run.metrics[-1]["round"] if run.metrics else 0
    seen = sorted(seen_clients(run.metrics))
    return {"origin": {"run": origin_text(run), "round": done, "seen": seen}}


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


def carried(session: Session, state: State, run: Run) -> State:
    """Returns the state before the first round, with what the clients and server of a run keep.

    The clients' states, such as private leaves and control variates, are taken over whole. The
    server's state, such as momentum and control variates, goes on if the new server keeps the same
    and neither one adds to frozen leaves: ``run.trained`` has these sums already.

    Args:
      session: of the new run, whose model is ``run.trained``.
      state: the state before its first round, with its clients in their place.

    Raises:
      InputError: the clients of the run keep something else than those of the new one.
    """
    rules = (run.algorithm.server.frozen_delta, session.setup.algorithm.server.frozen_delta)
    if rules == (None, None) and _shapes(run.server) == _shapes(state.server):
        state = state._replace(server=jax.tree.map(jnp.copy, run.server))
        state = state._replace(history=session.history(state, int(state.seed)))
    clients = session.setup.clients
    if not client_count(run.client_state):
        return session.placed(state)
    theirs = (client_count(run.client_state), _shapes(client_rows(run.client_state, 0)))
    mine = (clients, _shapes(client_rows(state.client_state, 0)))
    if mine != theirs:
        (n, new), (count, old) = mine, theirs
        raise InputError(
            f"The {count} clients of {origin_text(run)} keep {', '.join(old) or 'nothing'}, and the"
            f" {n} of this run {', '.join(new) or 'nothing'}. Take the algorithm, the roles and the"
            " number of clients of that run, or start from its global model only, in Python with"
            " fp.simulate(run.trained, ...) without origin."
        )
    kept = state.client_state
    if not isinstance(kept, StoredClients):
        rows = _rows(run.client_state, np.arange(clients))
        return session.placed(session.trimmed(state)._replace(client_state=rows))
    for ids in np.array_split(np.arange(clients), -(-clients // _TOGETHER)):
        kept.put(ids, ClientRow(_rows(run.client_state, ids), kept.take(ids).memory))
    return session.placed(state)


def _rows(client_state: PyTree, clients: np.ndarray) -> PyTree:
    """Returns copies of what some clients keep, as numpy arrays ``[n, ...]``."""
    if isinstance(client_state, StoredClients):
        return client_state.take(clients).client_state
    return jax.tree.map(lambda x: np.array(x)[clients], client_state)


def _shapes(kept: PyTree) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns path of a leaf -> shape and dtype."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (np.shape(x), str(x.dtype))
        for path, x in jax.tree.leaves_with_path(kept)
    }
