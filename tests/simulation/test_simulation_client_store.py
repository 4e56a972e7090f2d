"""Runs whose clients are in a store: checkpoints, resume after a kill at any point, loading."""

import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import toy

import fedjax_peft as fp
from fedjax_peft.engine import client_store
from fedjax_peft.errors import InputError

TESTS = Path(__file__).parents[1]
CLIENTS = 12
ALGORITHM = fp.algorithms.fedavg(optax.sgd(0.1), head="private")
ROUNDS = 7

CHILD = """
import itertools, os, signal, sys
from test_simulation_client_store import run
from fedjax_peft.engine import client_store
from fedjax_peft.simulation.client_checkpoints import ClientCheckpoints

out, place, how, at = *sys.argv[1:4], int(sys.argv[4])
calls = itertools.count(1)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def wrap(owner, name, before):
    original = getattr(owner, name)
    def wrapped(*args):
        if next(calls) == at:
            before(*args)
            die()
        return original(*args)
    setattr(owner, name, wrapped)

pwrite = os.pwrite
match how:
    case "before a write":
        wrap(client_store.os, "pwrite", lambda *_: None)
    case "in a write":
        wrap(client_store.os, "pwrite", lambda fd, data, at: pwrite(fd, data[: len(data) // 2], at))
    case "before the index":
        wrap(ClientCheckpoints, "write", lambda self, state: None)
    case "after the index":
        wrap(ClientCheckpoints, "keep", lambda *_: None)
run(out, place, resume=os.path.exists(out))
"""


def run(out=None, place="device", *, rounds=ROUNDS, **options):
    """Runs a federation in which few clients train, with private heads and error feedback."""
    return fp.simulate(
        *(toy.model(), ALGORITHM, toy.clients([5] * CLIENTS)),
        **{"test": toy.dataset(16, seed=7), "test_clients": 4, "batch_size": 4, "seed": 2},
        **{"clients_per_round": 3, "rounds": rounds, "checkpoint_every": 2, "eval_every": 3},
        transforms=fp.transforms.top_k(0.3, error_feedback=True),
        out=out,
        client_state=place,
        **options,
    )


def rows_of(run):
    return [{k: v for k, v in row.items() if k != "time"} for row in run.metrics]


def check_same(found, expected):
    assert rows_of(found) == rows_of(expected)
    for client in range(CLIENTS):
        one, other = found.client_params(client), expected.client_params(client)
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.fixture(scope="module")
def whole():
    """A run on the device that was never interrupted."""
    return run()


@pytest.mark.parametrize("place", ["host", "disk"])
def test_runs_equal_those_of_the_device_and_resume(place, whole, tmp_path):
    check_same(run(place=place), whole)
    out = tmp_path / "run"
    run(out, place, rounds=3)
    resumed = run(out, place, resume=True)
    check_same(resumed, whole)
    memory = resumed.client_state.take(range(CLIENTS)).memory
    assert any(np.any(x) for x in jax.tree.leaves(memory))
    loaded = fp.load_run(out, model=toy.model(), algorithm=ALGORITHM)
    check_same(loaded, whole)
    assert loaded.client_state.take([0]).memory == ()
    # A record for the start, and at most three for a client: now, and in two checkpoints.
    slots = (out / "clients" / "records.bin").stat().st_size
    assert slots <= (1 + 3 * CLIENTS) * resumed.client_state.store.packing.nbytes
    with pytest.raises(InputError, match="client_state was"):
        run(out, rounds=9, resume=True)


@pytest.mark.parametrize(
    "options",
    [
        {"asynchronous": fp.asynchronous.fedbuff(2)},
        {"availability": fp.availability.diurnal()},
        {"deadline": 3.0, "time_model": fp.TimeModel(spread=1.0)},
        {"diagnostics": ["local"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_kinds_of_runs_equal_those_of_the_device(options):
    check_same(run(place="host", **options), run(**options))


KILLS = [
    ("disk", "in a write", 2),  # before the first checkpoint
    ("disk", "before a write", 11),
    ("disk", "before the index", 3),
    ("disk", "after the index", 2),
    ("host", "in a write", 8),
    ("host", "after the index", 1),
]


@pytest.mark.slow
def test_kills_at_any_point_are_exact(whole, tmp_path):
    for i, (place, how, at) in enumerate(KILLS):
        out = tmp_path / str(i)
        command = [sys.executable, "-c", CHILD, str(out), place, how, str(at)]
        paths = [str(TESTS), str(TESTS / "simulation")]
        done = subprocess.run(
            [*command[:2], f"import sys; sys.path[:0] = {paths}\n{CHILD}", *command[3:]],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        check_same(run(out, place, resume=True), whole)


def test_a_damaged_record_does_not_pass(tmp_path, whole):
    out = tmp_path / "run"
    run(out, "disk", rounds=3)
    path = out / "clients" / "records.bin"

    def flip():  # a bit of the state of clients that never trained
        data = path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])

    flip()
    with pytest.raises(InputError, match=r"client \d+ in .*records\.bin is damaged"):
        run(out, "disk", resume=True)
    flip()
    check_same(run(out, "disk", resume=True), whole)


def test_the_older_checkpoint_stays_readable(tmp_path, whole):
    out = tmp_path / "run"
    run(out, "disk", rounds=6)
    newest = out / "checkpoints" / "6"
    for file in [*newest.rglob("*")]:
        if file.is_file():
            file.write_bytes(b"")
    check_same(run(out, "disk", resume=True), whole)  # from round 4


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, whole, monkeypatch):
    out, calls, pwrite = tmp_path / "run", [], client_store.os.pwrite

    def full(*args):
        calls.append(args)
        if len(calls) > 12:
            raise OSError(28, "No space left on device")
        return pwrite(*args)

    with monkeypatch.context() as patched:
        patched.setattr(client_store.os, "pwrite", full)
        with pytest.raises(InputError, match="No space left on device"):
            run(out, "disk")
    check_same(run(out, "disk", resume=True), whole)
