"""Draws whole small runs, and compares what must be equal about them.

    make proof                                         # an hour, or PROOF_SECONDS=20000
    make proof PROOF="--seed 2 --devices"              # other draws, on four host devices too
    python tests/proof/machine.py --seed S --only N    # one draw again, with its settings

``draws.py`` says what is drawn, and ``checks.py`` what is compared. Each draw is a line on the
screen and in a log, with which a later call goes on. At the end comes a table of the features whose
values ran together. The file ``proof.txt`` has the result of the last time.
"""

import argparse
import atexit
import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "helpers"))
from xla_flags import QUICK_TO_COMPILE

os.environ["XLA_FLAGS"] = " ".join(
    [
        QUICK_TO_COMPILE,
        "--xla_force_host_platform_device_count=4" if "--devices" in sys.argv else "",
        os.environ.get("XLA_FLAGS", ""),
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import memory
from checks import Verdict, check
from draws import FEATURES, Draw, draw
from pairs import table

ROOT = pathlib.Path(__file__).resolve().parents[2]
os.fsync = lambda file: None  # no run loses power, and waiting for the disk takes longest


def main() -> int:
    """Runs draws until the time is over; returns 1 if one failed."""
    given = _arguments()
    warnings.simplefilter("ignore")
    _compile_quickly()
    if given.only is not None:
        one = draw(given.seed, given.only)
        return _say(one, check(one, given.devices), 0.0, settings=True)
    log = given.log or ROOT / "runs" / f"proof-{given.seed}{'-devices' * given.devices}.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if given.again:
        known = [line if not line["faults"] else _ran(given, line["number"]) for line in known]
        log.write_text("".join(json.dumps(line) + "\n" for line in known))
        return _summary(given.seed, known)
    end = time.monotonic() + given.seconds
    while time.monotonic() < end and len(known) < given.draws:
        known.append(_ran(given, len(known)))
        with log.open("a") as file:
            file.write(json.dumps(known[-1]) + "\n")
        memory.release()
    return _summary(given.seed, known)


def _ran(given: argparse.Namespace, number: int) -> dict[str, Any]:
    """Returns the line of a draw."""
    one, began, busy = draw(given.seed, number), time.monotonic(), time.process_time()
    verdict = check(one, given.devices)
    seconds, busy = time.monotonic() - began, time.process_time() - busy
    _say(one, verdict, seconds)
    said = {"number": number, "word": verdict.word, **verdict._asdict()}
    return said | {"seconds": round(seconds, 2), "busy": round(busy, 2)}


def _compile_quickly() -> None:
    kept = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if kept is None:
        kept = tempfile.mkdtemp(prefix="proof-programs-")
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
    for name, value in {
        "jax_disable_most_optimizations": True,
        "jax_traceback_in_locations_limit": 0,
        # An attack or privacy makes new functions for each run, whose programs are the same.
        "jax_compilation_cache_dir": kept,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the draws")
    parser.add_argument("--seconds", type=float, default=3600, help="after which to stop")
    parser.add_argument("--draws", type=int, default=10**9, help="after which to stop")
    parser.add_argument("--only", type=int, help="the number of one draw")
    parser.add_argument("--again", action="store_true", help="the failed draws of the log")
    parser.add_argument("--devices", action="store_true", help="compare with a mesh too")
    parser.add_argument("--log", type=pathlib.Path, help="the file of the verdicts")
    return parser.parse_args()


def _say(one: Draw, verdict: Verdict, seconds: float, settings: bool = False) -> int:
    text = " | ".join(verdict.faults or verdict.notes).replace("\n", " / ")
    what = f"{one['algorithm']:11s} {one['model']:4s}"
    print(f"{one.number:5d} {seconds:5.1f}s {verdict.word:9s} {what} {text[:240]}", flush=True)
    if settings:
        usual = {name: next(iter(values)) for name, values in FEATURES.items()}
        print(json.dumps({k: v for k, v in one.of.items() if v != usual[k]}, indent=1))
        print(*verdict.faults, *verdict.notes, sep="\n")
    elif verdict.faults:
        again = f"python tests/proof/machine.py --seed {one.seed} --only {one.number}"
        print(f"      again: {again}{' --devices' if '--devices' in sys.argv else ''}", flush=True)
    return int(bool(verdict.faults))


def _summary(seed: int, known: list[dict]) -> int:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    words = Counter(line["word"] for line in known).most_common()
    print(f"\nmake proof, {datetime.date.today()}, commit {commit}, jax {jax.__version__}:")
    print(f"{len(known)} draws of seed {seed}: {', '.join(f'{n} {word}' for word, n in words)}\n")
    print(table([draw(seed, line["number"]).of for line in known if line["word"] != "refused"]))
    failed = [line["number"] for line in known if line["faults"]]
    print(f"Failed: {failed or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
