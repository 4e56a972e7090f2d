"""The server of a deployed run: the rounds of ``simulate``, with clients that are elsewhere.

A deployed run is a simulated one whose round program (:mod:`.rounds`) sends a message, waits for
uploads, and takes the server's step. So rows, checkpoints, evaluations, stop rules and resuming are
those of ``simulate``, and so are the numbers. An upload that does not come, or cannot be used, is
lost: the round goes on as with a client that failed, and its row names the client and the reason.
"""

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft import tasks
from fedjax_peft.contracts import Encoded, Key, PyTree, Task, Transform
from fedjax_peft.data.classes import has_names
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.deploy.rounds import Exchange, Rounds
from fedjax_peft.deploy.wire import pack, table_of
from fedjax_peft.engine.calls import alone
from fedjax_peft.engine.session import Session
from fedjax_peft.models.base import Model
from fedjax_peft.simulation.arguments import Given
from fedjax_peft.simulation.client_models import FEDERATION
from fedjax_peft.simulation.moment import Measure
from fedjax_peft.simulation.records import Placement, System
from fedjax_peft.simulation.run import Run
from fedjax_peft.simulation.simulate import simulating
from fedjax_peft.simulation.storage.fingerprint import changed_leaf, sums
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError


def serve(given: Given, exchange: Exchange, clients: int) -> Run:
    """Runs the server of a deployed run.

    Args:
      given: the arguments of ``simulate``. What it says of the clients' data is replaced by what
        the clients say of themselves.
      clients: how many there are.

    Raises:
      InputError: a setting that only a simulation can have; or clients that do not answer, or have
        another model, other columns, another task, or another version of this package.
    """
    check_deployable(given)
    given = replace(given, task=_task_of(given))
    known = _introduced(given, exchange, clients)
    rounds = Rounds(exchange, known, given)
    engine: Any = rounds.program  # which a user cannot choose
    served = replace(
        given,
        clients=_clients(known),
        system=on_server(given.system),
        placement=replace(Placement(lanes=1), engine=engine),
    )

    def adapt(session: Session) -> list[Measure]:
        without_clients_state(session, given.test)
        return [rounds.measure]

    return alone(simulating(served, adapt))


def _task_of(given: Given) -> Task | None:
    """Returns the task of the run, or of the server's examples; None: only the clients have one."""
    data = (x for x in (given.test, given.validation) if getattr(x, "task", None) is not None)
    return given.task or next(map(tasks.for_data, data), None)


def on_server(system: System) -> System:
    """Returns what remains of the simulated system where clients are real."""
    return System(
        time=system.time,
        client_ranks=system.client_ranks,
        stragglers=system.stragglers,
        nonfinite=system.nonfinite,
    )


def check_deployable(given: Given) -> None:
    """Raises InputError for what a deployed run cannot have."""
    reasons: dict[str, Any] = {
        "attack": given.attack and "real clients attack if they want to",
        "asynchronous": given.asynchronous
        and "the order of a simulated clock has no meaning for clients that answer when they can",
        "values": given.values and "run-time values are for sweeps of simulated runs",
    }
    how = given.evaluation
    for name in ("client_test", "client_validation"):
        reasons[name] = getattr(how, name) and "the server has no model of a client's own"
    reasons["origin"] = given.records.origin and "begin with the model of that run, run.trained"
    own = {*given.diagnostics} & {"local", "cka"}
    if own:
        reasons[f"diagnostics = {sorted(own)}"] = "the server does not have the clients' models"
    if given.privacy is not None and given.made("privacy").name == "distributed":
        reasons["privacy = 'distributed'"] = (
            "its guarantee needs that the server sees the sum of the clients' integers and nothing"
            " else, and this transport gives it each upload. Use 'local', or 'central'"
        )
    for name, reason in reasons.items():
        if reason:
            raise InputError(f"{name} cannot be deployed: {reason}.")


def without_clients_state(session: Session, test: Dataset | None) -> None:
    """Changes a session to that of a server, which keeps nothing of its clients.

    Raises:
      InputError: there is a test set, and no model that the server could test.
    """
    setup = session.setup
    if test is not None and session.leaves[1]:
        raise InputError(
            f"{setup.algorithm.name!r} has private leaves, which stay with the clients, so the"
            " server has no model to test: leave test out (in a config evaluation.global_test ="
            " false)."
        )
    algorithm = setup.algorithm._replace(
        init_client_state=lambda shared, private: {}, tuning=None, personal=False
    )
    transform = None if setup.transform is None else _without_memory(setup.transform)
    session.setup = setup._replace(algorithm=algorithm, transform=transform, maker=None)


def _without_memory(transform: Transform) -> Transform:
    """Returns a transform whose clients' memory is not here; its client part gives shapes only."""

    def client(update: PyTree, memory: PyTree, received: PyTree, key: Key) -> Encoded:
        return transform.client(update, transform.memory(update), received, key)

    return transform._replace(memory=lambda template: (), client=client)


def _introduced(given: Given, exchange: Exchange, clients: int) -> list[dict[str, Any]]:
    """Returns what each client has said of itself; of a run that goes on, perhaps when it began.

    Raises:
      InputError: a client is missing, or does not fit.
    """
    path, model = Path(given.out or "") / FEDERATION, given.model
    before = json.loads(path.read_bytes()) if given.resume and path.exists() else []
    said = {n: table_of(x, f"client {n}") for n, x in exchange.greet(pack({}, {}), clients).items()}
    missing = sorted({*range(clients)} - {*said})
    if missing and len(before) != clients:
        raise InputError(
            f"Of {clients} clients, {', '.join(map(str, missing))} cannot be reached. Start a"
            " SuperNode for each, with --node-config 'client=NUMBER'."
        )
    mine = {name: sums(leaf) for name, leaf in {**model.frozen, **model.trainable}.items()}
    for number, one in sorted(said.items()):
        _check_client(number, one, mine, model, said[min(said)])
        _check_task(number, one["task"], given.task, said[min(said)]["task"])
    kept = ("examples", "weight", "columns", "labels", "task")
    return [{k: said[n][k] for k in kept} if n in said else before[n] for n in range(clients)]


def _check_client(
    number: int,
    said: Mapping[str, Any],
    mine: Mapping[str, Any],
    model: Model,
    first: Mapping[str, Any],
) -> None:
    """Raises InputError for a client that does not fit the server or the first client."""
    mine_is = importlib.metadata.version("fedjax_peft")
    if said["version"] != mine_is:
        raise InputError(
            f"Client {number} has fedjax_peft {show(said['version'])}, and the server"
            f" {mine_is}: install the same version everywhere."
        )
    theirs = said["leaves"]
    for name in sorted({*mine, *theirs}):
        if name not in mine or name not in theirs or changed_leaf(theirs[name], mine[name]):
            raise InputError(
                f"Client {number} has another model: its leaf {name!r} is not that of the server."
                " Frozen weights are not sent: give every machine the same checkpoint, and the"
                " model the same seeds."
            )
    labels, whose = [*model.labels], "the model"
    if not has_names(model.labels):
        labels, whose = [*first["labels"]], "the first client"
    if said["labels"] != labels:
        raise InputError(
            f"Client {number} has the classes {show(said['labels'])}, and {whose} has"
            f" {show(labels)}: say them, in their order, with data.label_names."
        )
    if said["columns"] != first["columns"]:
        odd = sorted(
            k
            for k in {*said["columns"], *first["columns"]}
            if said["columns"].get(k) != first["columns"].get(k)
        )
        raise InputError(
            f"Client {number} has other columns than the first client: {', '.join(odd)}. Encode"
            " the data of all clients in the same way (data.max_length)."
        )


def _check_task(number: int, theirs: str | None, task: Task | None, first: str | None) -> None:
    """Raises InputError for a client whose task has another name than the server's or the first."""
    name, whose = first, "the first client"
    if task is not None:
        name, whose = getattr(task, "name", None), "the server"
    if theirs != name:
        raise InputError(
            f"Client {number} has the task {show(theirs)}, and {whose} has {show(name)}: give all"
            " the same task=, or data of the same task."
        )


def _clients(known: Sequence[Mapping[str, Any]]) -> Clients:
    """Returns clients of the sizes that they have, without an example of theirs."""
    first = known[0]
    columns = {n: np.zeros((1, *shape), dtype) for n, (dtype, shape) in first["columns"].items()}
    task = first["task"] if first["task"] in tasks.__all__ else None  # its functions are not here
    data = Dataset(columns, tuple(first["labels"]), "clients", task=task)
    weights = None
    if any(one["weight"] is not None for one in known):
        weights = np.array([one["weight"] or one["examples"] for one in known], np.float64)
    return Clients(
        data, tuple(np.zeros(one["examples"], np.int32) for one in known), weights=weights
    )
