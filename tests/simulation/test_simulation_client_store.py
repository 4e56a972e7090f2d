"""Runs whose clients are in a store: checkpoints, resume after a kill at any point, loading."""

import functools
import itertools
import os
import signal

import jax
import numpy as np
import pytest
import running
import toy
from closeness import approx, assert_close
from internals import client_records
from killing import children
from refusals import refused
from running import PRIVATE, model, rows

import fedjax_peft as fp
from fedjax_peft.simulation.storage.client_checkpoints import ClientCheckpoints

pytestmark = pytest.mark.slow

CLIENTS = 12
FEDERATION, TEST = toy.clients([5] * CLIENTS), toy.dataset(16, seed=7)
FEEDBACK = fp.transforms.top_k(0.3, error_feedback=True)
ROUNDS = 7


def child(out, place, how, at):
    """Runs in a process that kills itself at the call number ``at`` of a function."""
    calls, pwrite = itertools.count(1), os.pwrite

    def half(file, data, offset):
        pwrite(file, data[: len(data) // 2], offset)

    def die_in(owner, name, before=lambda *_: None):
        original = getattr(owner, name)

        def wrapped(*args):
            if next(calls) == at:
                before(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        setattr(owner, name, wrapped)

    match how:
        case "before a write":
            die_in(client_records.os, "pwrite")
        case "in a write":
            die_in(client_records.os, "pwrite", half)
        case "before the index":
            die_in(ClientCheckpoints, "write")
        case "after the index":
            die_in(ClientCheckpoints, "keep")
    run(out, place)


def run(out=None, place="device", *, rounds=ROUNDS, **options):
    """Runs a federation in which few clients train, with private heads and error feedback."""
    options |= {"test": TEST, "test_clients": 4, "seed": 2, "clients_per_round": 3}
    options |= {"clients": FEDERATION, "eval_every": 3, "checkpoint_every": 2, "out": out}
    return running.run(PRIVATE, transforms=FEEDBACK, rounds=rounds, client_state=place, **options)


def check(found, expected, rtol=0.0, atol=0.0):
    """Compares runs; those on the device are computed by another program."""
    (xs, form), (ys, same) = (jax.tree.flatten(rows(one)) for one in (found, expected))
    assert form == same
    for x, y in zip(xs, ys, strict=True):
        assert x == (approx(y, rel=rtol, abs=atol) if isinstance(y, float) else y)
    for client in range(CLIENTS):
        one, other = found.client_params(client), expected.client_params(client)
        assert one.keys() == other.keys()
        for name in one:
            assert_close(one[name], other[name], rtol=rtol, atol=atol)


@functools.cache
def straight(place):
    """Returns the run without interruption."""
    return run(place=place)


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.sample("disk")
def test_runs_equal_those_of_the_device_and_resume(place, tmp_path):
    whole = straight(place)
    if place == "host":  # a store on disk beside the device: tests/proof
        check(whole, straight("device"), rtol=1e-5, atol=1e-6)
    out = tmp_path / "run"
    run(out, place, rounds=3)
    resumed = run(out, place, resume=True)
    check(resumed, whole)
    memory = resumed.client_state.take(range(CLIENTS)).memory
    assert any(np.any(x) for x in jax.tree.leaves(memory))
    loaded = fp.load_run(out, model=model(), algorithm=PRIVATE)
    check(loaded, whole)
    assert loaded.client_state.take([0]).memory == ()
    # A record for the start, and at most three for a client: now, and in two checkpoints.
    slots = (out / "clients" / "records.bin").stat().st_size
    assert slots <= (1 + 3 * CLIENTS) * resumed.client_state.store.packing.nbytes
    refused("client_state: ", run, out, rounds=9, resume=True)


def test_the_record_of_the_start_stays_after_a_resume(tmp_path):
    """All clients have trained, so that no version refers to it; slot 0 means an untrained one."""
    options = {"clients": FEDERATION, "client_state": "disk", "out": tmp_path / "run"}
    running.run(PRIVATE, rounds=1, **options)
    resumed = running.run(PRIVATE, rounds=2, resume=True, **options)
    assert resumed.client_state.index["slot"].min() > 0


KILLS = [
    *(("disk", "in a write", 2), ("host", "after the index", 1), ("disk", "before the index", 3)),
    *(("host", "in a write", 8), ("disk", "before a write", 11), ("disk", "after the index", 2)),
]


@pytest.mark.exhaustive
@pytest.mark.long("processes are killed and started again")
def test_kills_at_any_point_are_exact(tmp_path):
    with children(__name__) as run_child:
        for place, how, at in KILLS:
            out = tmp_path / f"{place} {how}"
            assert run_child(out, place, how, at) == -signal.SIGKILL
            check(run(out, place, resume=True), straight(place))


def test_a_damaged_record_does_not_pass(tmp_path):
    out = tmp_path / "run"
    run(out, "disk", rounds=3)
    path = out / "clients" / "records.bin"

    def flip():  # a bit of the state of clients that never trained
        data = path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])

    flip()
    refused(r"client \d+ in .*records\.bin is damaged", run, out, "disk", resume=True)
    flip()
    check(run(out, "disk", resume=True), straight("disk"))


def test_the_older_checkpoint_stays_readable(tmp_path):
    out = tmp_path / "run"
    run(out, "disk", rounds=6)
    newest = out / "checkpoints" / "6"
    for file in [*newest.rglob("*")]:
        if file.is_file():
            file.write_bytes(b"")
    check(run(out, "disk", resume=True), straight("disk"))  # from round 4


def test_a_full_disk_in_the_middle_of_a_record_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    out, calls, pwrite = tmp_path / "run", [], client_records.os.pwrite

    def full(file, data, offset):
        calls.append(offset)
        if len(calls) > 12:
            pwrite(file, data[: len(data) // 2], offset)
            raise OSError(28, "No space left on device")
        return pwrite(file, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(client_records.os, "pwrite", full)
        refused("No space left on device", run, out, "disk")
    check(run(out, "disk", resume=True), straight("disk"))
