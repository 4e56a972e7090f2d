"""``sweep --submit``: it starts the workers of a study elsewhere, as the table ``[executor]`` says.

[executor]
name = "slurm"          # or "local", "dask", "ray"
jobs = 16               # workers
gpus_per_node = 1       # the other keys are those of the library that starts them
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.cli import workers
from fedjax_peft.cli.main import main
from fedjax_peft.report.executors import requeued
from fedjax_peft.support.display import counted
from fedjax_peft.support.errors import InputError, check_known, first_line
from fedjax_peft.support.libraries import install


def submit(table: Any, words: Sequence[Any], out: Path) -> list[str]:
    """Starts the workers, and returns the names of their jobs.

    Args:
      table: ``[executor]``.
      words: the command of a worker.
      out: the directory of the study.

    Raises:
      InputError: the table is wrong, a library is missing, or the jobs were not taken.
    """
    if not isinstance(table, Mapping) or "name" not in table:
        raise InputError(
            "The config does not say where to submit the workers. Give it a table [executor] with"
            ' name = "slurm" (or "local", "dask", "ray") and jobs = 16.'
        )
    options = dict(table)
    name, jobs = options.pop("name"), options.pop("jobs", 1)
    check_known("executor", name, _KINDS, " for [executor] name")
    if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1:
        raise InputError(f"[executor] jobs = {jobs!r} must be a number of workers, 1 or more.")
    try:
        return _KINDS[name](options, jobs, [*map(str, words)], out.resolve())
    except ModuleNotFoundError as error:
        raise InputError(f"[executor] {name} needs {error.name}: {install(name)}.") from None
    except InputError:
        raise
    except Exception as error:  # of any library
        why = f"{type(error).__name__}: {first_line(error)}".rstrip(".")
        raise InputError(
            f"[executor] {name} took no jobs: {why}. Check the keys"
            f" {', '.join(options) or 'of [executor]'} and the queue, and give the command again:"
            " what has been submitted goes on, and workers share the points."
        ) from error


@requeued
def work(words: Sequence[str]) -> None:
    """Is a worker's job: runs a command of ``fedjax-peft``.

    Raises:
      InputError: points have failed; the job's log says which.
    """
    if code := main(words):
        raise InputError(f"The worker ended with the code {code}; its log says why.")


def _local(options: dict[str, Any], jobs: int, words: list[str], out: Path) -> list[str]:
    if options:
        raise InputError(f"[executor] local has no key {next(iter(options))!r}: give jobs alone.")
    gpus = workers.devices()
    if gpus and jobs > len(gpus):
        raise InputError(f"[executor] jobs = {jobs}: this machine has {counted(len(gpus), 'GPU')}.")
    begun = [workers.start(words, out, i, gpus[i] if gpus else None) for i in range(jobs)]
    return [f"process {process.pid}" for process, _ in begun]


def _slurm(options: dict[str, Any], jobs: int, words: list[str], out: Path) -> list[str]:
    import submitit

    executor = submitit.AutoExecutor(out / "jobs", cluster=options.pop("cluster", "slurm"))
    executor.update_parameters(**{"name": "fedjax-peft", "timeout_min": 240, **options})
    with executor.batch():  # an array
        submitted = [executor.submit(work, words) for _ in range(jobs)]
    return [f"job {one.job_id}" for one in submitted]


def _dask(options: dict[str, Any], jobs: int, words: list[str], out: Path) -> list[str]:
    import distributed

    if not isinstance(address := options.pop("address", None), str):
        raise InputError('[executor] dask needs address = "tcp://HOST:8786", of its scheduler.')
    with distributed.Client(address, timeout="20s", set_as_default=False) as client:
        futures = [client.submit(work, words, pure=False, **options) for _ in range(jobs)]
        distributed.fire_and_forget(futures)
    return [f"task {one.key}" for one in futures]


def _ray(options: dict[str, Any], jobs: int, words: list[str], out: Path) -> list[str]:
    from ray.job_submission import JobSubmissionClient

    if not isinstance(address := options.pop("address", None), str):
        raise InputError('[executor] ray needs address = "http://HOST:8265", of its dashboard.')
    client, command = JobSubmissionClient(address), shlex.join(["fedjax-peft", *words])
    return [f"job {client.submit_job(entrypoint=command, **options)}" for _ in range(jobs)]


_KINDS: dict[str, Callable[[dict[str, Any], int, list[str], Path], list[str]]] = {
    "local": _local,
    "slurm": _slurm,
    "dask": _dask,
    "ray": _ray,
}
