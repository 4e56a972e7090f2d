"""Clients in host memory or in a file: the same results as on the device, and safe records."""

import functools
import gc

import jax
import numpy as np
import optax
import pytest
import toy
from closeness import assert_trees_close
from internals import Program, client_records
from options import session_options
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.engine.stores import client_store
from fedjax_peft.engine.stores.client_records import ClientRow
from fedjax_peft.engine.stores.store_files import memory_store, open_store, temporary_store

pytestmark = pytest.mark.slow

SIZES = (7, 4, 12, 1, 9, 3)
FEDERATION = toy.clients(SIZES)
TEST = toy.dataset(26, seed=7)
SGD = optax.sgd(0.1)
FEEDBACK = fp.transforms.top_k(0.3, error_feedback=True)
PRIVATE = fp.algorithms.fedavg(SGD, head="private")
CASES = {
    "scaffold": (fp.algorithms.scaffold(SGD, learning_rate=0.1), {}),
    "both": (PRIVATE, {"transforms": FEEDBACK, "lanes": 3}),
    "fedrep": (fp.algorithms.fedrep(SGD, tune_epochs=2), {"failure_rate": 0.3, "lanes": 1}),
}


@functools.cache
def model():
    return toy.lora_model(dropout=0)


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


def kept(state):
    """Returns what the clients keep, in the form of the device."""
    if isinstance(state.client_state, client_store.StoredClients):
        return state.client_state.take(range(len(SIZES)))
    memory = getattr(state.transform_state, "memory", ())
    rows = jax.device_get((state.client_state, memory))  # perhaps with unused rows at the end
    return ClientRow(*jax.tree.map(lambda x: x[: len(SIZES)], rows))


def rounds(case, place, model, **options):
    """Returns everything that five rounds give; consecutive cohorts overlap."""
    algorithm, more = CASES[case]
    options = {"clients_per_round": 4, "batch_size": 4, "client_state": place, **more, **options}
    session = fp.session(model, algorithm, FEDERATION, **session_options(**options))
    state, found = session.init(3), []
    for _ in range(5):
        state, info = session.step(state)
        found.append(jax.device_get((info.sums, info.norms, info.aggregation)))
    found.append(session.evaluate(state, TEST, clients=range(len(SIZES)), batch_size=8))
    if algorithm.tuning is not None:
        tuned = session.tune(state)
        found += [kept(tuned), session.evaluate(tuned, TEST)]
    state, _ = session.step(state)  # the evaluation changed nothing
    return jax.device_get(state.server), kept(state), found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample("both", "fedrep")
def test_results_are_those_of_the_device(case, monkeypatch):
    host = rounds(case, "host", model())
    if case != "both":  # which test_engine_meshes.py compares
        assert_trees_close(host, rounds(case, "device", model()))
    same(host, rounds(case, "disk", model()))
    if case == "fedrep":  # evaluation and tuning in small parts
        monkeypatch.setattr(client_store, "_MOST_CLIENTS", 3)
        assert_trees_close(host, rounds(case, "host", model()))


def test_programs_get_the_clients_of_a_round_only(monkeypatch):
    clients, seen = 1000, []
    call = Program.__call__

    def watched(self, state, plan, round_index):
        arrays = (state.client_state, state.transform_state)
        seen.extend(x.shape[0] for x in jax.tree.leaves(arrays) if x.ndim)
        return call(self, state, plan, round_index)

    monkeypatch.setattr(Program, "__call__", watched)
    options = {"clients_per_round": 3, "local_steps": 1, "transforms": FEEDBACK}
    algorithm = fp.algorithms.fedavg(SGD, head="private")
    federation = toy.clients([1] * clients)
    session = fp.session(
        model(), algorithm, federation, **session_options(client_state="host", **options)
    )
    state = session.init(0)
    for _ in range(3):
        state, _ = session.step(state)
    session.evaluate(state, TEST, clients=range(20))
    assert seen
    assert max(seen) <= 20
    # Clients that never trained share a record.
    assert state.client_state.store.slots <= 1 + 9


def test_sessions_without_kept_state_need_no_store():
    session = fp.session(
        toy.model(),
        fp.algorithms.fedavg(SGD),
        FEDERATION,
        placement=fp.Placement(client_state="disk"),
    )
    assert session.init(0).client_state == {}


def test_a_step_consumes_its_state_and_a_copy_stays():
    session = fp.session(model(), PRIVATE, FEDERATION, placement=fp.Placement(client_state="host"))
    first = session.init(0)
    copy = first.copy()
    second, _ = session.step(first)
    refused("consumed by an earlier", session.step, first)
    again, _ = session.step(copy)
    same(kept(second), kept(again))
    store = second.client_state.store
    assert store.slots == 2 * len(SIZES)  # nobody has the initial state, and versions differ
    del again, copy, first
    gc.collect()
    assert store.slots == len(SIZES)


def row(value):
    return ClientRow({"a": np.full((2, 3), value, np.float32), "b": np.int32(value)})


def stack(*values):
    return jax.tree.map(lambda *xs: np.stack(xs), *map(row, values))


@pytest.mark.parametrize("make", [memory_store, temporary_store])
def test_versions_share_records_until_they_are_written(make):
    store = make(row(0), 100_000)
    one = store.start(row(7))
    assert store.slots == 1
    one.put([5, 99_999], stack(1, 2))
    two = one.copy()
    one.put([5, 6], stack(3, 4))
    same(one.take([4, 5, 6, 99_999]), stack(7, 3, 4, 2))
    same(two.take([4, 5, 6, 99_999]), stack(7, 1, 7, 2))
    assert store.slots == 5
    before = one.index["slot"][5]
    one.put([5], stack(8))
    assert one.index["slot"][5] == before  # nobody else has this slot
    del two
    gc.collect()
    assert store.slots == 4


def test_rows_that_are_put_replace_what_was_prefetched():
    session = fp.session(model(), PRIVATE, FEDERATION, placement=fp.Placement(client_state="disk"))
    state, _ = session.step(session.init(0))
    everyone = range(len(SIZES))
    zeros = jax.tree.map(np.zeros_like, state.client_state.take(everyone))
    state.client_state.put(everyone, zeros)
    plan = session.plan(2)
    found = state.client_state.on_device(plan.client, session.setup.layout.put)
    assert not any(np.any(x) for x in jax.tree.leaves(found))


def test_a_damaged_record_names_its_client(tmp_path):
    store = open_store(tmp_path / "clients", row(0), 10, "new")
    version = store.start(row(0))
    version.put([3, 4], stack(1, 2))
    path = tmp_path / "clients" / "records.bin"
    data = bytearray(path.read_bytes())
    size, slot = store.packing.nbytes, int(version.index["slot"][3])
    data[slot * size + 5] ^= 1
    path.write_bytes(data)
    same(version.take([4, 9]), stack(2, 0))
    refused(r"client 3 in .*records\.bin is damaged.*--resume", version.take, [4, 3])
    path.write_bytes(data[: slot * size + 3])  # a file that ends too early
    refused(r"client 3 .*damaged", version.take, [3])


def test_errors_of_the_disk_reach_the_caller(monkeypatch):
    session = fp.session(model(), PRIVATE, FEDERATION, placement=fp.Placement(client_state="disk"))
    state, _ = session.step(session.init(0))
    state.client_state.settle()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(client_records.os, "pwrite", full)
    state, _ = session.step(state)
    refused(r"No space left on device.*--resume", session.step, state)


def test_records_of_other_shapes_are_refused(tmp_path):
    open_store(tmp_path, row(0), 10, "new").start(row(0))
    with pytest.raises(fp.InputError, match="another model"):
        open_store(tmp_path, ClientRow({"a": np.zeros((2, 4), np.float32)}), 10, "resume")
    refused("other clients", open_store, tmp_path, row(0), 11, "read")
    (tmp_path / "format.json").write_text("{")
    refused("cannot be opened", open_store, tmp_path, row(0), 10, "resume")


def test_unknown_places_and_engines_are_refused():
    with pytest.raises(fp.InputError, match=r"'dist' is unknown.*disk"):
        fp.session(toy.model(), PRIVATE, FEDERATION, placement=fp.Placement(client_state="dist"))
    with pytest.raises(fp.InputError, match="side by side"):
        fp.session(
            *(toy.model(), PRIVATE, FEDERATION),
            placement=fp.Placement(client_state="host", engine=lambda *_, **__: None),
        )
