"""Sweeps whose points run in the jobs of an executor: threads, processes, Slurm, Dask, Ray."""

import contextlib
import multiprocessing
import os
import warnings
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.report.executors import parts_of, work

POINTS = fp.grid({"algorithm.optimizer.learning_rate": [5e-3, 2e-2]}, seed=range(2))
PATH = os.pathsep.join(str(Path(__file__).parents[i] / x) for i, x in ((2, ""), (1, "helpers")))


@pytest.fixture(scope="module", autouse=True)
def paths():
    """Makes the processes that tests start find the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATH)
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield


@pytest.fixture(scope="module")
def given():
    """The arguments of a sweep over four points of one program."""
    config = {**fp.testing.TINY_BERT, "num_hidden_layers": 1}
    plain = fp.random_model(config, head=fp.heads.classification(classes=2))
    model = fp.attach(plain, fp.lora(rank=2))
    data = fp.testing.tiny_dataset(24, classes=2)
    algorithm = fp.algorithms.fedprox(fp.optimizers.adamw(1e-3), mu=0.1)
    return model, algorithm, fp.partition.iid(data, 3)


def sweep(given, out, points=POINTS, **options):
    options = {"rounds": 2, "clients_per_round": 2, "batch_size": 4, "local_steps": 1, **options}
    return fp.sweep(*given, points=points, out=out, choose_by="train_loss", **options)


@pytest.fixture(scope="module")
def alone(given, tmp_path_factory):
    """The directory of the sweep in one process."""
    out = tmp_path_factory.mktemp("alone")
    sweep(given, out)
    return out


def assert_same(one: Path, other: Path):
    """Raises if the runs of two sweeps differ by a bit."""
    files = sorted(path.relative_to(one) for path in one.glob("*/params.safetensors"))
    assert len(files) == len(POINTS)
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes()


@contextlib.contextmanager
def threads(folder):
    with ThreadPoolExecutor(1) as executor:
        yield executor


@contextlib.contextmanager
def processes(folder):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


@contextlib.contextmanager
def submitit_local(folder):
    submitit = pytest.importorskip("submitit")
    executor = submitit.LocalExecutor(folder)
    executor.update_parameters(timeout_min=5)
    yield executor


@contextlib.contextmanager
def dask_cluster(folder):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            1, threads_per_worker=1, dashboard_address=None, local_directory=folder
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor(pure=False)


@contextlib.contextmanager
def ray_workers(folder):
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            yield fp.executors.ray(max_retries=0)
        finally:
            ray.shutdown()


@pytest.mark.slow
@pytest.mark.long("starts processes that import JAX")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit's
@pytest.mark.parametrize("kind", [threads, processes, submitit_local, dask_cluster, ray_workers])
@pytest.mark.sample("threads", "dask_cluster", "ray_workers")
def test_an_executor_gives_the_bits_of_one_process(kind, given, alone, tmp_path):
    seen = []
    with kind(tmp_path / "jobs") as executor:
        found = sweep(
            given,
            tmp_path / "study",
            executor=executor,
            jobs=2,
            on_point=lambda done: seen.append(done.job.name),
        )
    assert_same(alone, tmp_path / "study")
    assert sorted(seen) == sorted(found.points)
    assert found.runs == {}
    assert len(found.study.cells) == 2
    assert found.best("train_loss").settings["point.algorithm.optimizer.learning_rate"] in (
        5e-3,
        2e-2,
    )


def test_points_of_one_program_stay_in_one_job():
    groups = {"rank 4": list("abcd"), "rank 8": list("ef"), "rank 16": ["g"]}
    assert parts_of(groups, None) == [list("abcd"), list("ef"), ["g"]]
    assert sorted(parts_of(groups, 2)) == [list("abcd"), list("efg")]
    assert sorted(parts_of(groups, 4)) == [["a", "b"], ["c", "d"], ["e", "f"], ["g"]]
    assert sorted(parts_of(groups, 100)) == [[name] for name in "abcdefg"]
    assert sorted(parts_of({"one": list("abcdefghij")}, 100, together=4)) == [
        list("abcd"),
        list("efgh"),
        ["i", "j"],
    ]
    assert parts_of({}, 3) == []


class Broken:
    """An executor that does its first jobs, loses the next one, and takes no more."""

    def __init__(self, done=0):
        self.done = done

    def submit(self, function, *arguments):
        self.done -= 1
        if self.done < -1:
            raise RuntimeError("QOSMaxSubmitJobPerUserLimit")
        future = Future()
        if self.done < 0:
            future.set_exception(OSError("killed"))
        else:
            future.set_result(function(*arguments))
        return future


@pytest.mark.slow
def test_a_lost_job_costs_nothing_and_a_full_queue_is_said(given, alone, tmp_path):
    refused(
        r"1 of 4 runs .* its job ended early \(OSError: killed\)\. Give the call again",
        *(sweep, given, tmp_path),
        executor=Broken(3),
        jobs=4,
    )
    fine = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.jsonl")}
    assert len(fine) == 3
    full = r"did not take job 2 of 4: QOSMaxSubmitJobPerUserLimit\. What was submitted .* goes on"
    refused(full, sweep, given, tmp_path / "new", executor=Broken(0), jobs=4)
    sweep(given, tmp_path, executor=Broken(1), jobs=4)
    assert_same(alone, tmp_path)
    assert all(path.stat().st_mtime_ns == time for path, time in fine.items())


def test_what_cannot_be_done_by_jobs_is_refused(given, tmp_path):
    refused("no method submit", sweep, given, tmp_path, executor=3)
    refused("give out=", sweep, given, None, executor=Broken())
    fork = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
    refused(r"forks this process.*get_context\('spawn'\)", sweep, given, tmp_path, executor=fork)
    model, algorithm, clients = given
    changed = model.replace(trainable={name: x + 1 for name, x in model.trainable.items()})
    refused(
        "cannot be sent .*: the model does not know the call.*functions of the point",
        *(sweep, (changed, algorithm, clients), tmp_path),
        executor=Broken(),
    )


def test_a_preempted_job_is_submitted_again():
    helpers = pytest.importorskip("submitit.helpers")
    again = helpers.DelayedSubmission(work, "study", ["a"], "out")._checkpoint_function()
    assert (again.function, again.args) == (work, ("study", ["a"], "out"))


def test_a_worker_with_other_versions_is_refused():
    old = ({"jax": "0.0.1"}, b"")
    refused("process that submits has another version of jax 0.0.1", work, old, [], ".")
