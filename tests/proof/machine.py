"""Draws whole small runs, and compares what must be equal about them.

    make proof                                            # one hour; SECONDS=20000 for more
    python tests/proof/machine.py --seed 1 --seconds N    # goes on where its log ends
    python tests/proof/machine.py --seed S --only N       # one draw again, with its settings
    python tests/proof/machine.py --devices               # on a mesh of four host devices too

:mod:`draws` says what is drawn, and :mod:`checks` what is compared. Each draw is a line on the
screen and in the log. A table of the pairs of features that ran together comes at the end.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
import warnings
from collections import Counter

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
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

os.fsync = lambda file: None  # no run loses power, and waiting for the disk takes longest


def main() -> int:
    """Runs draws until the time is over; returns 1 if one failed."""
    given = _arguments()
    warnings.simplefilter("ignore")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_traceback_in_locations_limit", 0)
    # The same programs are often asked for again: an attack or privacy makes new functions.
    kept = os.environ.get("JAX_COMPILATION_CACHE_DIR") or tempfile.mkdtemp(prefix="proof-programs-")
    jax.config.update("jax_compilation_cache_dir", kept)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if given.only is not None:
        one = draw(given.seed, given.only)
        return _say(one, *_timed(one, given.devices), settings=True)
    log = given.log or pathlib.Path(f"/tmp/fedjax_peft-proof-{given.seed}.jsonl")
    known = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    number, end = len(known), time.monotonic() + given.seconds
    while time.monotonic() < end and number < given.draws:
        one = draw(given.seed, number)
        busy = time.process_time()
        verdict, seconds = _timed(one, given.devices)
        busy = time.process_time() - busy
        _say(one, verdict, seconds)
        known.append(
            {
                "number": number,
                "word": verdict.word,
                "seconds": round(seconds, 2),
                "busy": round(busy, 2),
            }
        )
        known[-1] |= {"faults": verdict.faults, "notes": verdict.notes}
        with log.open("a") as file:
            file.write(json.dumps(known[-1]) + "\n")
        number += 1
        memory.release()
    return _summary(given.seed, known)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the draws")
    parser.add_argument("--seconds", type=float, default=3600, help="after which to stop")
    parser.add_argument("--draws", type=int, default=10**9, help="after which to stop")
    parser.add_argument("--only", type=int, help="the number of one draw")
    parser.add_argument("--devices", action="store_true", help="compare with a mesh too")
    parser.add_argument("--log", type=pathlib.Path, help="a file for the verdicts")
    return parser.parse_args()


def _timed(one: Draw, devices: bool) -> tuple[Verdict, float]:
    begin = time.monotonic()
    return check(one, devices), time.monotonic() - begin


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
    print(f"\n{len(known)} draws of seed {seed}: {dict(Counter(line['word'] for line in known))}")
    print(table([draw(seed, line["number"]).of for line in known if line["word"] != "refused"]))
    failed = [line["number"] for line in known if line["faults"]]
    print(f"Failed: {failed or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
