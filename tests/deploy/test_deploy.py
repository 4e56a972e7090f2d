"""A deployed run is the simulated run: its leaves, its rows, and what goes wrong."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
import toy
from closeness import assert_close, assert_trees_close
from deployed import Exchange, client_of, deployed, kept, served
from refusals import refused
from safetensors.numpy import load_file, save

import fedjax_peft as fp
from fedjax_peft.config import loading
from fedjax_peft.deploy.wire import pack, table_of

MODEL = toy.lora_model()
SGD = fp.optimizers.sgd(0.1)
SIZES = [5, 11, 8, 3]
BUILT_IN = toy.clients(SIZES)


def right(outputs, batch):
    found = fp.tasks.classification().metrics(outputs, batch)
    return {"loss": found["loss"], "right": found["accuracy"]}


TASK = fp.tasks.Task(fp.tasks.classification().loss, right, headline="right")
"""A task of the data's own, with a metric that no built-in task has."""
CLIENTS = replace(BUILT_IN, data=replace(BUILT_IN.data, task=TASK))
TEST = replace(toy.dataset(16, seed=1), task=TASK)
HOW = {"rounds": 3, "batch_size": 4, "clients_per_round": 3}
FEDAVG = fp.algorithms.fedavg(SGD)

CASES = {
    "fedavg": (lambda: MODEL, FEDAVG, {}),
    "fra": (lambda: MODEL, fp.algorithms.fedavg(SGD, aggregator=fp.aggregators.fra()), {}),
    "fedmcp": (toy.dual_model, fp.algorithms.fedmcp(SGD), {}),
    "scaffold": (lambda: MODEL, fp.algorithms.scaffold(SGD, learning_rate=0.1), {}),
    "int8": (lambda: MODEL, FEDAVG, {"transforms": fp.transforms.int8(8, error_feedback=True)}),
    "fedex": (lambda: MODEL, fp.algorithms.fedex(SGD), {}),
    "client ranks": (lambda: MODEL, FEDAVG, {"system": fp.System(client_ranks=[1, 2])}),
    "local privacy": (
        lambda: MODEL,
        FEDAVG,
        {"privacy": fp.privacy.local(clip=1.0, noise_multiplier=0.1), "seed": 3},
    ),
}


def simulated(make, algorithm, **options):
    return fp.simulate(make(), algorithm, CLIENTS, placement=fp.Placement(lanes=1), **options)


@pytest.mark.sample("fedmcp", "scaffold", "int8", "client ranks")  # fedavg: as int8
@pytest.mark.parametrize("name", CASES)
def test_a_deployed_run_equals_the_simulated_one(name, tmp_path):
    """Rounding alone differs: the client's program has one lane and one slot."""
    make, algorithm, options = CASES[name]
    options = {**HOW, **options}
    personal = name == "fedmcp"
    expected = simulated(make, algorithm, test=None if personal else TEST, **options)
    salt = None
    if "privacy" in options:  # a real client has its own secret
        salt = session_salt(make, algorithm, options)
    options |= {"test": None if personal else TEST, "out": tmp_path / "run"}
    run, exchange = deployed(make(), algorithm, CLIENTS, tmp_path / "clients", salt=salt, **options)
    assert_trees_close(run.server, expected.server, rtol=0, atol=1e-6)
    for got, row in zip(run.metrics, expected.metrics, strict=True):
        assert got.keys() == row.keys()
        for field in ("clients", "bytes_up", "bytes_down", "steps"):
            assert got.get(field) == row.get(field), field
        for field in ("train_loss", "test_loss", "test_right", "update_norm"):
            if row.get(field) is not None:
                assert_close(got[field], row[field], rtol=1e-5)
    if jax.tree.leaves(expected.client_state):
        last = max(row["round"] for row in run.metrics if 0 in row.get("clients", ()))
        own = jax.tree.map(lambda x: np.asarray(x)[0], expected.client_state)
        got = kept(exchange, 0, last).client_state
        assert_trees_close(got, own, rtol=0, atol=1e-6)
    if personal:  # a client's own model is in its folder, whole
        leaves = load_file(tmp_path / "clients" / "client-0" / "model.safetensors")
        assert {*leaves} == {*make().trainable}
        assert_trees_close({n: leaves[n] for n in got}, got, rtol=0, atol=0)


def session_salt(make, algorithm, options):
    session = fp.session(
        make(), algorithm, CLIENTS, **{k: options[k] for k in options if k != "seed"}
    )
    return np.asarray(session.init(options["seed"]).salt)


FOUR = {**HOW, "clients_per_round": 4}


def changed(answer, **table):
    """Returns an answer with another table."""
    return pack({}, {**table_of(answer, "test"), **table})


FAULTS = {
    2: ("answers for round 1 instead of 2", lambda answer, first: first),
    3: ("answers for client 1 instead of 2", lambda answer, first: changed(answer, client=1)),
    4: ("is damaged", lambda answer, first: b"\x00" * 64),
    5: ("sent 2,097,152 bytes", lambda answer, first: b"\x00" * (2 << 20)),
    6: ("sent other leaves", lambda answer, first: changed(answer)),
    7: ("its disk is full", lambda answer, first: changed(answer, error="its disk is full")),
    8: ("its report cannot be read", lambda answer, first: changed(answer, sums=3)),
    9: ("has not answered", lambda answer, first: None),
}
"""Round -> what is said of client 2, and (its answer, that of round 1) -> what arrives."""


def test_a_round_goes_on_without_an_answer_that_cannot_be_used(tmp_path, capsys):
    """Its numbers are those of a simulated round in which the client failed."""
    first = {}

    def spoil(index, client, answer):
        first.setdefault(client, answer)
        bad = client == 2 and index in FAULTS
        return FAULTS[index][1](answer, first[client]) if bad else answer

    options = {**FOUR, "rounds": 10}
    run, _ = deployed(MODEL, FEDAVG, CLIENTS, tmp_path, spoil=spoil, **options)
    said = capsys.readouterr().err
    for index, (why, _) in FAULTS.items():
        row = run.metrics[index]
        assert (row["clients"], row["failed"]) == ([0, 1, 3], [2])
        assert why in row["lost"]["2"]
        assert f"round {index} goes on without client 2: " in said
    assert all("failed" not in run.metrics[index] for index in (1, 10))
    session = fp.session(MODEL, FEDAVG, CLIENTS, **options, placement=fp.Placement(lanes=1))
    state = session.init(0)
    for index in range(1, 11):
        state, _ = session.step(state, session.plan(index, 0, [2] if index in FAULTS else []))
    assert_trees_close(run.server, state.server, rtol=0, atol=2e-6)  # of ten rounds


def test_an_upload_that_is_not_finite_is_dropped(tmp_path):
    poisoned = toy.poisoned(CLIENTS, 1)
    run, _ = deployed(MODEL, FEDAVG, poisoned, tmp_path, **{**FOUR, "rounds": 1})
    expected = fp.simulate(MODEL, FEDAVG, poisoned, **{**FOUR, "rounds": 1})
    assert run.metrics[1]["dropped"] == expected.metrics[1]["dropped"] == [1]
    assert_trees_close(run.server, expected.server, rtol=0, atol=1e-6)


def test_server_and_clients_go_on_where_they_were(tmp_path):
    """A server that was killed goes back to its checkpoint, and its clients go back with it."""
    scaffold = CASES["scaffold"][1]
    options = {**FOUR, "records": fp.Records(checkpoint_every=2)}
    expected = simulated(lambda: MODEL, scaffold, **FOUR)

    class Killed(Exception):
        pass

    def kill(index, client, answer):
        if (index, client) == (3, 1):  # clients 3, 2 and 1 have trained in round 3 already
            raise Killed
        return answer

    with pytest.raises(Killed):
        deployed(
            *(MODEL, scaffold, CLIENTS, tmp_path / "clients"),
            **{**options, "out": tmp_path / "run"},
            spoil=kill,
        )
    again = {**options, "out": tmp_path / "run", "resume": True}
    run, _ = deployed(MODEL, scaffold, CLIENTS, tmp_path / "clients", **again)
    assert_trees_close(run.server, expected.server, rtol=0, atol=1e-6)
    assert [row["round"] for row in run.metrics] == [0, 1, 2, 3]


def test_a_client_without_its_folder_is_lost_and_named(tmp_path):
    scaffold = CASES["scaffold"][1]

    def forget(index, client, answer):
        for path in (tmp_path / "client-3").rglob("round-1.safetensors"):
            path.unlink()
        return answer

    options = {**FOUR, "rounds": 2}
    run, _ = deployed(MODEL, scaffold, CLIENTS, tmp_path, spoil=forget, **options)
    assert "Client 3 has no state of round 1" in run.metrics[2]["lost"]["3"]


def test_a_server_has_nothing_of_its_clients(tmp_path):
    """Its checkpoints hold no private leaves, and no file says what was trained on."""
    make, algorithm, _ = CASES["fedmcp"]
    options = {**HOW, "rounds": 1, "out": tmp_path / "run"}
    run, exchange = deployed(make(), algorithm, CLIENTS, tmp_path / "clients", **options)
    assert not jax.tree.leaves(run.client_state)
    assert not (tmp_path / "run" / "trained_rows.safetensors").exists()
    table = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert [one["examples"] for one in table] == SIZES
    assert {"examples", "weight", "columns", "labels", "task"} == {*table[0]}
    refused("private leaves", served, make(), algorithm, exchange, **HOW, test=TEST)
    again = fp.load_run(tmp_path / "run", model=make(), algorithm=algorithm)
    refused("are private to the clients.*The clients of .* were real", again.predict, TEST)


def test_a_clients_model_is_in_its_own_folder(tmp_path, monkeypatch):
    """The server's directory has the global model, and says where those of the clients are."""
    model, ditto = toy.lora_model(), fp.algorithms.ditto(SGD, lam=0.5)
    options = {**HOW, "rounds": 2, "out": tmp_path / "run"}
    expected = simulated(lambda: model, ditto, **options | {"out": None})
    deployed(model, ditto, CLIENTS, tmp_path / "clients", **options)
    run = fp.load_run(tmp_path / "run", model=model, algorithm=ditto)
    assert_trees_close(run.params, expected.params, rtol=0, atol=1e-6)
    elsewhere = "its own machine, in the folder of its SuperNode's `state`"
    assert_trees_close(run.trained.trainable, run.params, rtol=0, atol=0)
    for ask in (run.client_params, lambda n: run.predict(TEST, client=n)):
        refused(elsewhere, ask, 0)
    again = {"rounds": 1, "records": fp.Records(origin=run)}
    with pytest.warns(UserWarning, match="does not say which examples"):
        refused(elsewhere, fp.simulate, run.trained, ditto, CLIENTS, **again)
    monkeypatch.setattr(loading, "base_model", lambda *_: model)
    monkeypatch.setattr(loading, "algorithm_of", lambda *_: ditto)
    refused(elsewhere, loading.load_models, tmp_path / "run", "0")
    folder = tmp_path / "clients" / "client-0"
    found = loading.load_real_client(tmp_path / "run", folder)
    assert_trees_close(found.params(None), expected.client_params(0), rtol=0, atol=1e-6)
    refused("no model.safetensors", loading.load_real_client, tmp_path / "run", tmp_path)
    (folder / "model.safetensors").write_bytes(save({"layer.lora_a": np.zeros(3, np.float32)}))
    refused("does not fit .*'layer.lora_a'", loading.load_real_client, tmp_path / "run", folder)
    (folder / "model.safetensors").write_bytes(b"12")
    refused("cannot be read", loading.load_real_client, tmp_path / "run", folder)


def other_model():
    leaf = "layer.base.kernel"
    return MODEL.replace(frozen={leaf: MODEL.frozen[leaf] + 0.1})


def greeted(tmp_path, **changes):
    """Returns a server's arguments, with client 1 made in another way."""
    parts = {"model": MODEL, "federation": CLIENTS, **changes}
    clients = [client_of(MODEL, FEDAVG, CLIENTS, n, tmp_path, **HOW) for n in range(4)]
    own = (parts["model"], FEDAVG, parts["federation"], 1)
    clients[1] = client_of(*own, tmp_path, **HOW)
    return Exchange(clients)


def test_clients_that_do_not_fit_are_named(tmp_path):
    """Frozen weights are compared by name, classes by their names, columns by their shapes."""
    names = ("class 0", "class 2", "class 1")
    data = CLIENTS.data
    renamed = fp.Clients(fp.Dataset(data.columns, names, "toy"), CLIENTS.indices)
    columns = {**data.columns, "more": np.zeros(len(data), np.float32)}
    wider = fp.Clients(fp.Dataset(columns, data.label_names, "toy"), CLIENTS.indices)
    for change, why in (
        ({"model": other_model()}, "Client 1 has another model: its leaf 'layer.base.kernel'"),
        ({"federation": renamed}, "Client 1 has the classes"),
        ({"federation": wider}, "Client 1 has other columns than the first client: more"),
    ):
        refused(why, served, MODEL, FEDAVG, greeted(tmp_path, **change), **HOW)
    for options, whose in ({}, "the first client"), ({"test": TEST}, "the server"):
        why = f"Client 1 has the task 'classification', and {whose} has 'own'"
        exchange = greeted(tmp_path, federation=BUILT_IN)
        refused(why, served, MODEL, FEDAVG, exchange, **HOW, **options)
    missing = greeted(tmp_path)
    missing.clients[2] = None
    refused("Of 4 clients, 2 cannot be reached", served, MODEL, FEDAVG, missing, **HOW)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"attack": fp.attacks.sign_flip(0.5)}, "attack cannot be deployed"),
        ({"asynchronous": fp.asynchronous.fedbuff(2)}, "asynchronous cannot be deployed"),
        ({"evaluation": fp.Evaluation(diagnostics=["local"])}, "diagnostics = .'local'"),
        ({"evaluation": fp.Evaluation(client_test=CLIENTS)}, "client_test cannot be deployed"),
        (
            {"privacy": fp.privacy.distributed(clip=1.0, noise_multiplier=1.0)},
            "the server sees the sum",
        ),
    ],
)
def test_what_only_a_simulation_can_have_is_refused(options, why):
    refused(why, served, MODEL, FEDAVG, Exchange([None]), **HOW, **options)


def test_the_noise_of_a_client_is_its_own(tmp_path):
    """It differs from the simulation's, and the server cannot ask twice, or for too long."""
    _, algorithm, options = CASES["local privacy"]
    options = {**FOUR, **options}
    expected = simulated(lambda: MODEL, algorithm, **options)
    made, exchange = deployed(MODEL, algorithm, CLIENTS, tmp_path, **options)
    with pytest.raises(AssertionError):
        assert_trees_close(made.server, expected.server, rtol=0, atol=1e-6)
    client = exchange.clients[0]
    for round_index, why in ((3, "a second answer"), (4, "one, and the run has 3")):
        (run,) = (path for path in (tmp_path / "client-0").iterdir() if path.is_dir())
        table = {"run": run.name, "round": round_index}
        refused(why, client._own_salt, b"another message", table)
