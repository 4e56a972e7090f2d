"""Which points a worker takes of a shared study, and for whom it waits."""

import errno
import fcntl
import json
import os
import socket
import threading
import time

import pytest
from made_runs import write_run
from refusals import refused

from fedjax_peft.simulation import points, sharing
from fedjax_peft.simulation.points import Job, run_points
from fedjax_peft.simulation.sharing import Share, failure_file, note_failure
from fedjax_peft.simulation.storage.lock import NAME, RunLock, check_locks, locked_here_only

JOBS = [Job(name, 1, lambda path, resume, stop: path) for name in "abc"]


class Runs:
    """Made-up runs that take no time; ``faults`` has what the run of a name raises."""

    def __init__(self):
        self.names, self.faults = [], {}
        self.metrics = [{"round": 1}]

    def __call__(self, out):
        self.names.append(out.name)
        if out.name in self.faults:
            raise self.faults[out.name]
        finish(out)
        yield from ()
        return self


@pytest.fixture
def runs(monkeypatch):
    made = Runs()
    monkeypatch.setattr(points, "simulating", made)
    monkeypatch.setattr(points, "check_recorded", lambda given: None)
    monkeypatch.setattr(sharing, "_POLL", 0.05)
    return made


def finish(out):
    """Makes a finished run of a directory, which may have a lock."""
    (out / "checkpoints" / "1").mkdir(parents=True)
    (out / "metrics.jsonl").write_text('{"round": 1}\n')


def leave(run, host, age=0.0):
    """Writes the lock that a process of a host has left, ``age`` seconds ago."""
    run.mkdir(exist_ok=True)
    lock = run / NAME
    lock.write_text(json.dumps({"pid": 7, "host": host, "token": "", "since": "noon"}))
    os.utime(lock, (time.time() - age,) * 2)


def work(out, **share):
    """Works on the three points as one of several workers; returns what is said of each point."""
    said = {}
    report = lambda done: said.update({done.job.name: done.error or ""})  # noqa: E731
    run_points(JOBS, out=out, share=Share(**share), on_point=report)
    return said


def test_a_worker_skips_what_others_have_and_waits_for_it(runs, tmp_path, capfd):
    (tmp_path / "a").mkdir()
    lock = RunLock.take(tmp_path / "a")

    def end():
        while "waiting for the last points, which others run: a (process" not in said[0]:
            said[0] += capfd.readouterr().err
            time.sleep(0.01)
        finish(tmp_path / "a")
        lock.release()

    said = [""]
    other = threading.Thread(target=end)
    other.start()
    assert list(work(tmp_path)) == ["b", "c", "a"]
    other.join()
    assert runs.names == ["b", "c"]


def test_a_point_may_be_run_elsewhere_while_this_process_reads_its_data(runs, tmp_path):
    """So a shared point is always one to continue: the lock is taken after the data are read."""
    asked = []
    job = Job("a", 1, lambda path, resume, stop: asked.append(resume) or path)
    run_points([job], out=tmp_path / "one", share=None)
    (tmp_path / "shared").mkdir()
    run_points([job], out=tmp_path / "shared", share=Share())
    assert asked == [False, True]


def test_the_point_of_a_process_that_has_ended_is_taken_over(runs, tmp_path):
    leave(tmp_path / "a", socket.gethostname())
    assert work(tmp_path) == {"a": "", "b": "", "c": ""}
    assert runs.names == ["a", "b", "c"]


def test_the_point_of_a_silent_machine_is_taken_over_when_asked(runs, tmp_path, capsys):
    leave(tmp_path / "b", "elsewhere", age=7200)
    refused(r"no sign of life for 2\.0 hours.* process 7 on elsewhere, which has b", work, tmp_path)
    assert runs.names == ["a", "c"]
    (tmp_path / "b" / "metrics.jsonl").touch()  # a sign of life
    assert list(work(tmp_path, take_over=3600, wait=False)) == ["a", "c"]
    os.utime(tmp_path / "b" / "metrics.jsonl", (time.time() - 3601,) * 2)
    assert work(tmp_path, take_over=3600)["b"] == ""
    assert "taking" in capsys.readouterr().err
    assert runs.names == ["a", "c", "b"]


def test_a_lock_that_was_taken_over_is_noticed(tmp_path):
    lock = RunLock.take(tmp_path)
    lock.check()
    RunLock.break_open(tmp_path)
    other = RunLock.take(tmp_path)
    refused("has taken .* over from this one", lock.check)
    lock.release()
    other.check()
    assert RunLock.holder(tmp_path).pid == os.getpid()
    other.release()


def test_a_failure_says_where_and_is_not_repeated_by_others(runs, tmp_path):
    note_failure(tmp_path / "c", "of an earlier call, which is tried again")
    (tmp_path / "b").mkdir()
    lock, fault = RunLock.take(tmp_path / "b"), "Too little memory."
    runs.faults["a"] = points.InputError("Too many clients.")

    def fail_elsewhere():
        while not failure_file(tmp_path / "a").exists():
            time.sleep(0.01)
        note_failure(tmp_path / "b", fault)
        lock.release()

    other = threading.Thread(target=fail_elsewhere)
    other.start()
    reasons = r"2 of 3 runs .* first failure, of a: Too many clients"
    refused(reasons, work, tmp_path)
    other.join()
    assert runs.names == ["a", "c"]
    assert fault in failure_file(tmp_path / "b").read_text()
    assert not failure_file(tmp_path / "c").exists()
    lock = RunLock.take(tmp_path / "b")
    lock.release()
    del runs.faults["a"]
    assert set(work(tmp_path).values()) == {""}
    assert not list(tmp_path.glob("*.failed"))


def test_a_fault_of_the_program_ends_one_worker_only(runs, tmp_path):
    runs.faults["b"] = TypeError("a defect")
    with pytest.raises(TypeError):
        work(tmp_path)
    assert "TypeError: a defect" in failure_file(tmp_path / "b").read_text()


def test_a_worker_with_other_versions_is_refused(runs, tmp_path):
    run = write_run(tmp_path / "a", {}, [{"round": 0}])
    (run / "environment.json").write_text(json.dumps({"versions": {"jax": "0.0.1"}}))
    with RunLock.take(run):
        refused(r"The worker that has .*a has another version of jax 0\.0\.1, here", work, tmp_path)
    assert runs.names == []


def test_locks_that_hold_on_one_machine_only_are_said(runs, monkeypatch, tmp_path, capsys):
    """NFS and Lustre say so in their options; the line is one of proc_pid_mountinfo(5)."""
    device = tmp_path.stat().st_dev
    line = f"36 35 {os.major(device)}:{os.minor(device)} / /net rw - nfs host:/a rw,vers=3,{{}}\n"
    mounts = tmp_path / "mountinfo"
    for option in ("nolock", "local_lock=all"):
        mounts.write_text("20 1 0:1 / / rw - ext4 disk rw\n" + line.format(option))
        assert locked_here_only(tmp_path, mounts) == option
    mounts.write_text(line.format("local_lock=none"))
    assert locked_here_only(tmp_path, mounts) is None
    mounts.write_text("no mounts\n")
    assert locked_here_only(tmp_path, mounts) is None
    assert locked_here_only(tmp_path, tmp_path / "none") is None
    monkeypatch.setattr(sharing, "locked_here_only", lambda out: "nolock")
    work(tmp_path)
    assert f"locks in {tmp_path} hold on this machine only" in capsys.readouterr().err


def test_file_systems_whose_locks_do_not_hold_are_refused(monkeypatch, tmp_path):
    check_locks(tmp_path)
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    refused("do not hold, so that several workers would run the same", check_locks, tmp_path)

    def missing(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    refused(r"are missing \(Function not implemented\)", check_locks, tmp_path)
    assert list(tmp_path.iterdir()) == []
