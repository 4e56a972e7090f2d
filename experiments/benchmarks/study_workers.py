"""A study of 24 points by one worker, by two that begin at the same time, and by one more later.

    python experiments/benchmarks/study_workers.py          # two methods, four seeds, three rates
    python experiments/benchmarks/study_workers.py --seeds 1 --rounds 1    # six points, a look

Workers are processes of ``fedjax-peft sweep --share`` on one directory. The script prints a table
of their CPU seconds, the wall seconds, the load of the machine at the end, and the programs that
each has compiled. It ends with an error if a run of two workers differs by a bit from that of one.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import harness

CONFIG = """
rounds = {rounds}
clients_per_round = 2
batch_size = 8
local_steps = 2
model.name = "{root}/model"
data.name = "{root}/data"
data.max_length = 12
partition.name = "dirichlet"
partition.clients = 6
partition.alpha = 1.0
peft.rank = 2
[methods.fedavg]
algorithm.name = "fedavg"
[methods.fedprox]
algorithm.name = "fedprox"
[sweep.grid]
seed = {seeds}
"optimizer.learning_rate" = {rates}
"""
RATES = [1e-3, 3e-3, 1e-2]


def write_study(root: Path, rounds: int, seeds: int) -> Path:
    """Writes a model of one layer, texts and the study's config; returns the config."""
    import fedjax_peft as fp

    with mock.patch.dict(fp.testing.TINY_BERT, num_hidden_layers=1):
        fp.testing.write_tiny_checkpoint(root / "model")
    fp.testing.write_tiny_texts(root / "data", train=80, test=40)
    study = root / "study.toml"
    form = {"root": root, "rounds": rounds, "seeds": list(range(seeds)), "rates": RATES}
    study.write_text(CONFIG.format(**form))
    return study


def work(study: Path, out: Path, workers: int, *more: str) -> dict[str, Any]:
    """Runs workers that begin at the same time; returns what they took."""
    command = [sys.executable, "-m", "fedjax_peft", "sweep", study, "--out", out, "--share", *more]
    env, began = {**os.environ, "JAX_PLATFORMS": "cpu"}, time.perf_counter()
    with contextlib.ExitStack() as stack:
        begun = []
        for place in range(workers):
            log = stack.enter_context((out.parent / f"{out.name}-{place}.log").open("w+"))
            words = [*map(str, command)]
            started = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=env)
            begun.append((started, log))
        seconds, programs = [], []
        for process, log in begun:
            _, status, used = os.wait4(process.pid, 0)
            log.seek(0)
            said = log.read()
            if status:
                sys.exit(said)
            seconds.append(round(used.ru_utime + used.ru_stime, 1))
            programs.append(int(re.findall(r"Programs: (\d+) compiled here", said)[-1]))
    wall = round(time.perf_counter() - began, 1)
    load = round(os.getloadavg()[0], 1)
    return {"cpu": seconds, "wall": wall, "load": load, "programs": programs}


def results(out: Path) -> dict[str, Any]:
    """Returns the bits of all runs of a study: rows without times, and leaves."""
    found = {}
    for file in sorted(out.rglob("metrics.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [{k: x for k, x in row.items() if k != "time"} for row in rows]
        name = file.parent.relative_to(out).as_posix()
        found[name] = rows, (file.parent / "params.safetensors").read_bytes()
    return found


def main() -> None:
    """Prints the table."""
    a: argparse.Namespace = harness.arguments(__doc__, rounds=6, seeds=4).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        study = write_study(root, a.rounds, a.seeds)
        found = {"1": work(study, root / "one", 1)}
        found["2, begun at the same time"] = work(study, root / "two", 2)
        one, two = results(root / "one"), results(root / "two")
        if one != two or len(one) != 2 * len(RATES) * a.seeds:
            sys.exit(f"the runs differ: {[n for n in one if one[n] != two.get(n)]}")
        later = work(study, root / "two", 1, f"seed={a.seeds}", "--only", "fedavg")
        found[f"1 more, for {len(RATES)} further points"] = later
    print(f"The runs of 1 and 2 workers are equal to the bit: {len(one)}.\n")
    heads = ("workers", "CPU seconds", "wall seconds", "load of the machine", "programs compiled")
    rows = (
        (name, *(" + ".join(map(str, x)) if isinstance(x, list) else x for x in one.values()))
        for name, one in found.items()
    )
    print(harness.markdown(heads, rows))


if __name__ == "__main__":
    main()
