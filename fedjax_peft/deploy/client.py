"""A client on a machine of its own: it trains as the simulated client of its number does.

Its keys, its batches and its upload follow from the seed, its number and the round, by the same
functions. What it keeps between rounds (private leaves, control variates, the memory of upload
transforms) stays in its folder, one file for each of its last rounds. The server says from which of
its rounds a client begins, so that it does not matter which side was interrupted, or when.
"""

import hashlib
import importlib.metadata
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from fedjax_peft import tasks
from fedjax_peft.contracts import Key, PyTree
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.deploy.received import MEASURED, down_form, receiving, room_for_upload, up_form
from fedjax_peft.deploy.wire import leaves_of, pack, table_of, unpack
from fedjax_peft.engine.compilation import use_compilation_cache
from fedjax_peft.engine.initial import without_clients
from fedjax_peft.engine.program import Program
from fedjax_peft.engine.round import RoundResult
from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.setup import Setup
from fedjax_peft.engine.state import State
from fedjax_peft.engine.stores.client_records import ClientRow
from fedjax_peft.engine.uploads import TransformState
from fedjax_peft.numerics.random import salted, stream, upload_key
from fedjax_peft.simulation.arguments import OfSession
from fedjax_peft.simulation.classes import in_models_classes
from fedjax_peft.simulation.session import session_of
from fedjax_peft.simulation.storage.fingerprint import sums
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file

KEPT_ROUNDS = 64
"""The rounds of a client whose state it keeps: a server that was killed goes back to an earlier
checkpoint, and its clients go back with it."""


class Client:
    """One client of a deployed run."""

    def __init__(self, given: OfSession, number: int, folder: Path, *, salt: Any = None):
        """Makes nothing that takes long.

        Args:
          given: the arguments of the run, whose ``clients`` has this client's data alone.
          number: of the client in the federation, from 0.
          folder: where it keeps its state.
          salt: of its noise, uint32 ``[2]``; None: its own secret, which its folder keeps.
        """
        use_compilation_cache()
        self._given, self.number, self._folder, self._salt = given, number, folder, salt
        self._made: dict[Any, tuple[Session, Schedule, Program]] = {}

    def hello(self, request: bytes) -> bytes:
        """Returns what the server must know of the client: sizes, columns and sums of leaves."""
        given = self._given
        model, clients = given.model, given.clients
        data: Dataset = clients.data
        leaves = {**model.frozen, **model.trainable}
        task = getattr(given.task or tasks.for_data(data), "name", None)
        return pack(
            {},
            {
                "client": self.number,
                "version": importlib.metadata.version("fedjax_peft"),
                "examples": int(clients.sizes[0]),
                "weight": None if clients.weights is None else float(clients.weights[0]),
                "columns": {n: [str(x.dtype), x.shape[1:]] for n, x in data.columns.items()},
                "labels": data.label_names,
                "task": task,
                "leaves": {name: sums(leaf) for name, leaf in sorted(leaves.items())},
            },
        )

    def train(self, message: bytes, kept: int) -> bytes:
        """Returns the upload of a round.

        Args:
          message: from the server, the same for all clients of the round.
          kept: the client's last round that counts, from whose state it goes on; 0: none.

        Raises:
          InputError: the message does not fit, or the client does not have the state of the round
            that the server goes on from.
        """
        table = table_of(message, "the server", None)
        session, schedule, program = self._prepared(table)
        setup, index, seed = session.setup, int(table["round"]), int(table["seed"])
        form = down_form(setup, session.leaves[0])
        received = unpack(message, form, "the server")[0]
        salt: Any = () if self._given.privacy is None else self._own_salt(message, table)
        row = self._restored(session, table["run"], kept, index)
        state = _state(setup, received, row)._replace(salt=jax.tree.map(jnp.array, salt), seed=seed)
        steps = 1 << max(schedule.most_steps(self.number) - 1, 0).bit_length()
        result = program(state, schedule.plan(index, 1, steps, members=[self.number]), index)
        template = received["template"]
        upload = jax.tree.map(
            lambda x, like: x[0].astype(like.dtype), result.state.server["upload"], template
        )
        if bool(result.finite[0]):
            memory = result.state.transform_state.memory if setup.transform is not None else ()
            after = ClientRow(result.state.client_state, memory)
            after = jax.tree.map(lambda x: np.asarray(x)[0], after)
            self._save(table["run"], index, after)
            self._save_model(session, received["broadcast"], upload, after.client_state)
        report = {"client": self.number, "round": index, "run": table["run"], **_report(result)}
        if setup.algorithm.aggregator.randomise is None:
            return pack(upload, report, template, up_form(setup, template)[1])
        key = upload_key(salted(stream(seed, "clients"), salt), index, self.number)
        return pack(_lifted(setup, upload, received, key, index), report)

    def _prepared(self, table: Mapping[str, Any]) -> tuple[Session, Schedule, Program]:
        """Returns the session, the schedule and the program of the run of a message."""
        own, seed = self._given.clients, int(table["seed"])
        sizes = table["sizes"] or [int(own.sizes[0])] * int(table["clients"])
        if (key := (seed, *sizes)) not in self._made:
            given = replace(self._given, clients=among(own, self.number, sizes))
            session = session_of(in_models_classes(given))
            schedule = session.schedule(seed)._replace(slots=1).for_lanes(1)
            parts = (receiving(session.setup), session.columns)
            program = Program(*parts, padded=schedule.padded, gathered=True)
            self._made = {key: (session, schedule, program)}
        return self._made[key]

    def _restored(self, session: Any, run: str, kept: int, index: int) -> ClientRow:
        """Returns what the client kept after the round that the server goes on from.

        States of later rounds, which the server does not know of, are removed.
        """
        _, first = without_clients(session.setup, session.leaves)
        folder = self._place(run)
        if not jax.tree.leaves(first):
            return first
        for number, path in _rounds(folder).items():
            if number > kept:
                path.unlink()
        if not kept:
            return first
        path = folder / f"round-{kept}.safetensors"
        if not path.exists():
            raise InputError(
                f"Client {self.number} has no state of round {kept} in {folder}, from which the"
                f" server begins round {index}. Give the client the folder that it had then, or"
                " begin a new run in another directory of the server."
            )
        return unpack(path.read_bytes(), first, str(path))[0]

    def _save(self, run: str, index: int, row: ClientRow) -> None:
        if not jax.tree.leaves(row):
            return
        folder = self._place(run)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / f"round-{index}.safetensors", pack(row, {"round": index}))
        for path in [*_rounds(folder).values()][:-KEPT_ROUNDS]:
            path.unlink()

    def _save_model(self, session: Session, broadcast: PyTree, upload: PyTree, own: PyTree) -> None:
        """Writes the leaves of a client's own model, which nobody else has."""
        algorithm = session.setup.algorithm
        known = algorithm.local_model is not None or {*leaves_of(broadcast)} == {*leaves_of(upload)}
        if session.personal and known:
            leaves = algorithm.before_aggregation(broadcast, upload, own)
            path = self._folder / f"client-{self.number}" / "model.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, safetensors.numpy.save(jax.tree.map(np.asarray, leaves)))

    def _place(self, run: str) -> Path:
        if not re.fullmatch("[0-9a-f]{1,64}", run):
            raise InputError(f"The server names the run {run[:80]!r}, which is no name of a run.")
        return self._folder / f"client-{self.number}" / run

    def _own_salt(self, message: bytes, table: Mapping[str, Any]) -> Any:
        """Returns the salt of the client's noise in a round, which the server must not know.

        Another message gives other noise, so that two answers do not cancel it.

        Raises:
          InputError: the server asks for more than the run's guarantee counts.
        """
        if self._salt is not None:
            return np.asarray(self._salt)
        index, folder = int(table["round"]), self._place(table["run"])
        path, asked = self._folder / f"client-{self.number}" / "secret", folder / f"asked-{index}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, secrets.token_bytes(32))
            path.chmod(0o600)
        made = hashlib.sha256(path.read_bytes() + message).digest()
        again = asked.exists() and asked.read_bytes() != made
        if again or index > self._given.rounds:
            what = "a second answer" if again else f"one, and the run has {self._given.rounds}"
            raise InputError(
                f"The server asks client {self.number} in round {index} for {what}: this would cost"
                " privacy that the run's guarantee does not count."
            )
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(asked, made)
        return np.frombuffer(made[:8], "<u4")


def _state(setup: Setup, received: Any, row: ClientRow) -> State:
    """Returns the state before a round, with one client."""
    received = jax.tree.map(jnp.array, received)  # copies, for the program consumes its state
    own: Any = jax.tree.map(lambda x: jnp.asarray(x)[None], row)
    server = {**received, "upload": room_for_upload(received["template"])}
    transform: Any = ()
    if setup.transform is not None:
        transform = TransformState(received["transform"], own.memory)
    return State(server, own.client_state, (), transform)


def _lifted(setup: Setup, upload: PyTree, received: Any, key: Key, index: int) -> PyTree:
    """Returns what a client sends of its lifted upload, with random numbers of its own."""
    aggregator = setup.algorithm.aggregator.bound(received["aggregator"])
    assert aggregator.randomise is not None
    lifted = aggregator.lift(upload, received["template"], setup.fixed)
    return aggregator.randomise(lifted, key, jnp.int32(index))


def _report(result: RoundResult) -> dict[str, Any]:
    """Returns what the server must know of a client's work beside the upload."""
    found = jax.device_get((result.finite, result.norms, result.sums, result.shares))
    finite, norms, sums_, shares = found
    measured = jax.device_get(result.aggregation)
    number = sum(name.startswith(MEASURED.format("")) for name in measured)
    return {
        "finite": bool(finite[0]),
        "norm": float(norms[0]),
        "sums": {name: [float(x[0]) for x in pair] for name, pair in sums_.items()},
        "shares": {name: float(x[0]) for name, x in shares.items()},
        "measured": [float(measured[MEASURED.format(i)]) for i in range(number)],
    }


def among(own: Clients, number: int, sizes: Sequence[int]) -> Clients:
    """Returns the clients of a federation of which only one has its examples here."""
    rows = [np.zeros(size, np.int32) for size in sizes]
    rows[number] = np.asarray(own.indices[0], np.int32)
    weights = None
    if own.weights is not None:
        weights = np.asarray(sizes, np.float64)
        weights[number] = own.weights[0]
    return Clients(own.data, tuple(rows), weights=weights)


def _rounds(folder: Path) -> dict[int, Path]:
    """Returns round -> file of the states in a folder, ascending."""
    paths = {int(path.stem.split("-")[1]): path for path in folder.glob("round-*.safetensors")}
    return dict(sorted(paths.items()))
