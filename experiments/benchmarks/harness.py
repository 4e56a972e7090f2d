"""What all benchmarks here share: arguments, turns, processes, tables, and facts of the machine.

A script says what it measures. Programs that are compared run in turns (:func:`turns`), a call
counts until its result is there (:func:`timed`), and what needs a process of its own is asked of
the script itself (:func:`ask`). Results are JSON with a Markdown table beside it (:func:`write`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def arguments(doc: str, **numbers: int) -> argparse.ArgumentParser:
    """Returns a parser with a script's docstring, and an option for each number."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in numbers.items():
        text = f"default {default}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=text)
    return parser


def timed(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the seconds until the arrays that a call returns are there.

    Args:
      run: the call.
      clock: ``time.process_time`` counts the seconds of this process alone.
    """
    import jax

    began = clock()
    jax.block_until_ready(run())
    return clock() - began


def turns(
    programs: Mapping[str, Callable[[], float]], repeats: int, warm: int = 1
) -> dict[str, list[float]]:
    """Returns what programs return that run in turns, so that other load affects all of them.

    Args:
      programs: name -> a call, such as one of :func:`timed`.
      repeats: turns that count.
      warm: turns before them. Each turn begins with another program.
    """
    found: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for turn in range(warm + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            value = programs[name]()
            if turn >= warm:
                found[name].append(value)
    return found


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Returns the median of the ratios of the same turns."""
    return statistics.median(x / y for x, y in zip(above, below, strict=True))


def ask(
    *command: Any, limit: float | None = None, check: bool = False, **environment: str
) -> dict[str, Any] | str:
    """Returns the JSON of a Python process's last line, or why there is none.

    Args:
      *command: a script and its arguments.
      limit: seconds.
      check: end this process too if that one fails.
      **environment: more variables. ``PYTHON`` is the interpreter.
    """
    python = environment.pop("PYTHON", sys.executable)
    options = {"env": {**os.environ, **environment}, "capture_output": True, "text": True}
    try:
        done = subprocess.run([python, *map(str, command)], timeout=limit, check=False, **options)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if check:
        sys.exit(done.stderr)
    return fault(done.stderr)


def fault(errors: str) -> str:
    """Returns the line of a process's errors that says why it failed."""
    lines = errors.splitlines()
    return ([x for x in lines if "Error" in x] or lines or ["failed"])[-1][:300]


def peak() -> int:
    """Returns the peak resident memory of the process so far, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine(*packages: str) -> dict[str, Any]:
    """Returns the device, processor, load and versions that numbers depend on."""
    import jax

    from fedjax_peft.support.processor import processor

    device = jax.devices()[0]
    return {
        "device": f"{device.device_kind} ({device.platform})",
        "processor": processor()["model"],
        "cores": os.cpu_count(),
        "openblas_threads": os.environ.get("OPENBLAS_NUM_THREADS"),
        "load_average": os.getloadavg()[0],
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "flax", *packages)},
    }


def print_json(a: argparse.Namespace, packages: Sequence[str] = (), **results: Any) -> None:
    """Prints one line of JSON: the arguments, the machine and the results."""
    given = {name: str(x) if isinstance(x, Path) else x for name, x in vars(a).items()}
    print(json.dumps({"arguments": given, "machine": machine(*packages), **results}))


def heading(names: Iterable[str]) -> str:
    """Returns the first two lines of a Markdown table."""
    names = list(names)
    return f"{line(names)}\n|{'---|' * len(names)}"


def line(cells: Iterable[Any]) -> str:
    """Returns a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a Markdown table."""
    return "\n".join([heading(names), *map(line, rows)]) + "\n"


def known(file: Path) -> dict[str, Any]:
    """Returns the results that a file has."""
    return json.loads(file.read_text()) if file.exists() else {}


def write(file: Path, found: Any, table: str | None = None) -> None:
    """Writes results, and their table beside them."""
    file.write_text(json.dumps(found, indent=1) + "\n")
    if table is not None:
        file.with_suffix(".md").write_text(table)


def random_texts(examples: int, length: int, classes: int = 20, words: int = 30522) -> Any:
    """Returns a data set of random tokens without padding, and random labels."""
    import numpy as np

    import fedjax_peft as fp

    rng = np.random.default_rng(0)
    columns = {
        "input_ids": rng.integers(5, words, (examples, length), dtype=np.int32),
        "attention_mask": np.ones((examples, length), bool),
        "labels": rng.integers(0, classes, examples, dtype=np.int32),
    }
    return fp.Dataset(columns, tuple(f"class {i}" for i in range(classes)), "random")
