"""The points of a sweep as the jobs of an executor: of processes, Slurm, Dask, Ray or any other.

An executor has ``submit(function, *arguments)``, which returns a future with ``done()`` and
``result()``. A job works on some points as one of several workers
(:mod:`fedjax_peft.simulation.sharing`) and returns nothing: the runs are in the study's directory.
"""

import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fedjax_peft.contracts.part import Call, call_of
from fedjax_peft.data.dataset import Clients
from fedjax_peft.models.base import Model
from fedjax_peft.simulation.sharing import check_versions, read_failure, versions
from fedjax_peft.simulation.storage.lock import RunLock
from fedjax_peft.support.errors import InputError, first_line
from fedjax_peft.support.libraries import install, pip

__all__ = ["ray"]

_Job = TypeVar("_Job", bound=Callable[..., Any])

_POLL = 0.5
"""Seconds between two looks at the futures."""


_GUARD = (
    " A script that starts processes is imported by each of them: put its calls below"
    ' if __name__ == "__main__":'
)


class Work(Protocol):
    """What a job does; it is sent to a worker."""

    def run(self, names: Sequence[str], out: Path) -> object:
        """Runs the points of these names."""


def parts_of(
    groups: Mapping[str, Sequence[str]], jobs: int | None, together: int = 1
) -> list[list[str]]:
    """Returns the names of the points of each job.

    Args:
      groups: the names of the points of each program. They stay in one job, but if there are more
        jobs than programs.
      jobs: the largest number of jobs; by default one for each program.
      together: points that run side by side, as one program; they stay in one job.
    """
    parts = [list(names) for names in groups.values()]
    if jobs is None:
        return parts
    while len(parts) > jobs:
        parts.sort(key=len, reverse=True)
        last = parts.pop()
        parts[-1] += last
    while 0 < len(parts) < jobs and len(longest := max(parts, key=len)) > together:
        half = -(-len(longest) // (2 * together)) * together
        parts.append(longest[half:])
        del longest[half:]
    return parts


def requeued(job: _Job) -> _Job:
    """Lets submitit submit a job again when it was preempted, or when its time has ended."""

    def again(*arguments: Any) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(job, *arguments)

    job.checkpoint = again  # type: ignore[attr-defined]
    return job


@requeued
def work(study: tuple[Mapping[str, str], bytes], points: Sequence[str], out: str) -> None:
    """Does a job: runs some points of a study, with the results in ``out``.

    Raises:
      InputError: this worker has other versions of packages than the process that submits; or as
        :func:`fedjax_peft.simulation.points.run_points`.
    """
    import pickle  # what this library sends to its own workers; it reads no files with it

    known, content = study
    check_versions(known, "The process that submits")
    asked: Work = pickle.loads(content)
    asked.run(points, Path(out))


def run(
    executor: Any,
    study: Work,
    parts: Sequence[Sequence[str]],
    out: Path,
    ended: Callable[[str, str | None], bool],
) -> None:
    """Submits a job for each part, and waits until all points have ended.

    Args:
      ended: reports a point that has finished, or failed with an error; returns whether it has.

    Raises:
      InputError: something cannot be sent, or the executor takes no more jobs.
    """
    if not callable(getattr(executor, "submit", None)):
        raise InputError(
            f"executor is a {type(executor).__name__}, which has no method submit. Give one such as"
            " loky.get_reusable_executor(2), submitit.AutoExecutor('jobs'),"
            " distributed.Client(...).get_executor() or fp.executors.ray()."
        )
    context = getattr(executor, "_mp_context", None)  # of concurrent.futures
    if context is not None and context.get_start_method() == "fork":
        raise InputError(
            "The executor forks this process, whose threads (JAX has some) do not come along, so"
            " that its workers can hang. Let it start new ones:"
            " ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('spawn'))."
        )
    left = [name for part in parts for name in part]
    before, lost = {name: read_failure(out / name) for name in left}, dict[str, str]()
    futures = _submitted(executor, study, parts, out)
    while left:
        at_work = bool(futures) or any(RunLock.holder(out / name) for name in left)
        for future, part in [one for one in futures if one[0].done()]:
            futures.remove((future, part))
            lost |= dict.fromkeys(part, _fault(future))
        failed = {name: read_failure(out / name) for name in left}
        reasons = {name: str(x) for name, x in failed.items() if x and x != before[name]}
        left = [name for name in left if not ended(name, reasons.get(name))]
        if not at_work:
            break
        time.sleep(_POLL if left else 0)
    for name in left:
        reason = lost.get(name) or "for no known reason"
        if reason.startswith("BrokenProcessPool"):
            reason += _GUARD
        ended(name, f"its job ended early ({reason}). Give the call again: it goes on from there.")


def _submitted(
    executor: Any, study: Work, parts: Sequence[Sequence[str]], out: Path
) -> list[tuple[Any, Sequence[str]]]:
    """Returns the futures of the jobs, each with the names of its points."""
    sent, futures = (versions(), _sent(study)), list[tuple[Any, Sequence[str]]]()
    for place, part in enumerate(parts):
        try:
            futures.append((executor.submit(work, sent, list(part), str(out.resolve())), part))
        except Exception as error:  # of any library
            raise InputError(
                f"The executor did not take job {place + 1} of {len(parts)}: {first_line(error)}."
                " What was submitted before goes on. Give the call again, with fewer jobs if the"
                " queue is full: what has finished by then is skipped."
            ) from error
    return futures


def _fault(future: Any) -> str:
    """Returns why a job ended early, "" if it did not."""
    try:
        future.result()
    except Exception as error:  # also of a worker that was killed; the runs say what is done
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def _sent(study: Work) -> bytes:
    """Returns a study as bytes; parts and models as the calls that made them.

    Raises:
      InputError: it has something that cannot be sent.
    """
    import pickle

    try:
        import cloudpickle

        base: Any = cloudpickle.Pickler
    except ModuleNotFoundError:
        base = pickle.Pickler

    class Pickler(base):
        def reducer_override(self, value: Any) -> Any:
            call = None if isinstance(value, Clients) else call_of(value)
            if call is not None and not call.unknown():
                return _made, (call.table(),)
            if isinstance(value, Model):
                raise TypeError("the model does not know the call that made it")
            return super().reducer_override(value) if base is not pickle.Pickler else NotImplemented

    file = io.BytesIO()
    try:
        Pickler(file).dump(study)
    except Exception as error:  # of any object's own
        more = f" Functions inside functions need cloudpickle: {pip()} install cloudpickle."
        raise InputError(
            f"The sweep cannot be sent to other processes: {first_line(error)}. Give the model and"
            " the parts as their functions returned them, or as functions of the point, such as"
            " lambda p: fp.attach(fp.load_model(...), ...)."
            f"{more if base is pickle.Pickler else ''}"
        ) from error
    return file.getvalue()


def _made(table: Mapping[str, Any]) -> Any:
    """Returns the part or model of a call."""
    return Call.read(table).build()


class _Ray:
    """The executor of :func:`ray`."""

    def __init__(self, options: Mapping[str, Any]):
        try:
            import ray
        except ModuleNotFoundError:
            raise InputError(f"Ray is not installed: {install('ray')}.") from None
        self._task = ray.remote(work)
        self._task = self._task.options(**options) if options else self._task

    def submit(self, function: Any, *arguments: Any) -> Any:
        return self._task.remote(*arguments).future()


def ray(**options: Any) -> Any:
    """Returns an executor of Ray's tasks, for ``fp.sweep``; call ``ray.init`` before.

    Args:
      **options: of a task, such as ``num_gpus=1`` and ``max_retries=3``.

    Raises:
      InputError: Ray is not installed.
    """
    return _Ray(options)
