"""Digests of 40 short runs, which tell whether a change of the code changed a bit of a result.

    python tests/tools/digests.py               prints the digests of this checkout: {run: SHA-256}
    python tests/tools/digests.py TEXT          the same, of runs whose names contain the text
    python tests/tools/digests.py OLD NEW TEXT  compares those of two checkouts' scripts

A digest covers the state after the last round (server, clients, transforms, aggregator) and the
rows of metrics without the wall time and the directions of metrics. Bits are comparable on one
machine only, with the same versions of JAX. Each checkout has its own script, for its own
interface; the names stay the same.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from xla_flags import QUICK_TO_COMPILE

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = QUICK_TO_COMPILE
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import numpy as np
import optax
import toy
from options import run_options

import fedjax_peft as fp
from fedjax_peft import (
    aggregators,
    algorithms,
    asynchronous,
    attacks,
    availability,
    privacy,
    testing,
    transforms,
)
from fedjax_peft.engine.session import Session
from fedjax_peft.simulation import session

SGD, ADAM = optax.sgd(0.1), optax.adam(0.05)
SIZES = (7, 4, 12, 1, 9)
CLIENTS, TEST = toy.clients(SIZES), toy.dataset(20, seed=5)
TRAIN, HELD_OUT = toy.clients((8, 5, 12, 6, 9)).holdout(0.4)
UNEQUAL = fp.TimeModel(1.0, 1e15, 1e15, 0.0, spread=1.0)
"""Clients of very different speeds, and transfers that take no time."""
EVERYONE = {"clients_per_round": None}
DEFAULTS: dict[str, Any] = {
    "model": toy.lora_model,
    "algorithm": algorithms.fedavg(SGD),
    "clients": CLIENTS,
    "test": TEST,
    "rounds": 2,
    "eval_every": 2,
    "clients_per_round": 4,
    "batch_size": 4,
    "lanes": 2,
    "progress": False,
}


def bert() -> fp.Model:
    """Returns a BERT of one layer with LoRA, for data that are texts."""
    return fp.attach(testing.tiny_model(num_hidden_layers=1), fp.lora(rank=2, dropout=0.1))


def texts() -> fp.Clients:
    """Returns three clients with texts, most of them of 6 of 32 tokens."""
    data = testing.tiny_dataset(24, length=32)
    data.columns["attention_mask"][:18, 6:] = False
    return fp.partition.iid(data, clients=3, seed=0)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {"algorithm": algorithms.fedavg(fp.optimizers.kept(ADAM)), "epochs": (1, 2)},
    "fedprox": {"algorithm": algorithms.fedprox(SGD, mu=0.1), "lanes": 4},
    "scaffold": {"algorithm": algorithms.scaffold(SGD, learning_rate=0.1), "lanes": 1},
    "fedadam": {"algorithm": algorithms.fedadam(SGD)},
    "fednova": {"algorithm": algorithms.fednova(SGD), "local_steps": (1, 4), "stragglers": 0.5},
    "feddyn": {"algorithm": algorithms.feddyn(SGD)},
    "moon": {"algorithm": algorithms.moon(SGD), "rounds": 3},
    "ditto": {"algorithm": algorithms.ditto(SGD, lam=0.5), "client_test": HELD_OUT},
    "apfl": {"algorithm": algorithms.apfl(SGD, adaptive=True)},
    "fedrep tuned": {"algorithm": algorithms.fedrep(SGD, tune_epochs=1), "client_test": HELD_OUT},
    "fedmcp": {"algorithm": algorithms.fedmcp(ADAM), "model": toy.dual_model},
    "flora": {"algorithm": algorithms.flora(SGD)},
    "fedex": {"algorithm": algorithms.fedex(SGD)},
    "fra": {"algorithm": algorithms.fedavg(SGD, aggregator=aggregators.fra()), "rounds": 3},
    "fra_ffa": {"algorithm": algorithms.fra_ffa(SGD, at=1), "rounds": 3},
    "hetlora ranks": {"algorithm": algorithms.hetlora(SGD, prune=0.5), "client_ranks": [1, 2]},
    "hilora": {
        "algorithm": algorithms.hilora(SGD, clients=5, root_rounds=1, cluster_rounds=1),
        "model": toy.sum_model,
        "rounds": 3,
        **EVERYONE,
    },
}
UPLOADS: dict[str, dict[str, Any]] = {
    "clip and top_k": {"transforms": [transforms.clip_norm(0.5), transforms.top_k(0.3)]},
    "sign host": {"transforms": transforms.sign(), "client_state": "host", "rounds": 3},
    "quantize": {"transforms": transforms.quantize(4), "nonfinite": "drop"},
    "power_sgd": {"transforms": transforms.power_sgd(1), "lanes": 4},
    "central": {"privacy": privacy.central(0.5, 1.0), "sampling": "poisson"},
    "local": {"privacy": privacy.local(0.5, 1.0)},
    "distributed": {"privacy": privacy.distributed(0.5, 1.0)},
    "example": {"privacy": privacy.example(0.5, 1.0), "batch_sampling": "poisson"},
    "adaptive": {"privacy": privacy.adaptive(0.5, 1.0), "sampling": "poisson", "rounds": 3},
    "sign_flip median": {
        "attack": attacks.sign_flip(0.4),
        "algorithm": algorithms.fedavg(SGD, aggregator=aggregators.median()),
    },
    "alie krum": {
        "attack": attacks.alie(0.2),
        "algorithm": algorithms.fedavg(SGD, aggregator=aggregators.multi_krum(1)),
        **EVERYONE,
    },
    "centred_clipping nonfinite": {
        "clients": toy.poisoned(CLIENTS, 0),
        "algorithm": algorithms.fedavg(SGD, aggregator=aggregators.centred_clipping()),
        **EVERYONE,
    },
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "fedbuff": {
        "asynchronous": asynchronous.fedbuff(2),
        "transforms": transforms.top_k(0.5),
        "time_model": UNEQUAL,
        "rounds": 3,
    },
    "fedasync": {"asynchronous": asynchronous.fedasync(), "time_model": UNEQUAL, "rounds": 3},
    "failures": {"failure_rate": 0.3, "failure_exponent": 1.0, "time_model": UNEQUAL, "rounds": 3},
    "late partial": {
        "algorithm": algorithms.fedprox(SGD),
        "deadline": 2.0,
        "late": "partial",
        "time_model": UNEQUAL,
        "local_steps": 4,
    },
    "availability": {"availability": availability.diurnal(period=20.0), "rounds": 3},
    "fedrep disk": {
        "algorithm": algorithms.fedrep(SGD),
        "client_state": "disk",
        "examples": "host",
        "rounds": 3,
    },
    "length buckets": {
        "model": bert,
        "clients": texts(),
        "test": None,
        "length_buckets": 3,
        "batch_size": 2,
        "lanes": 1,
        **EVERYONE,
    },
    "reference engine": {"engine": "reference", "transforms": transforms.sign()},
    "diagnostics": {
        "diagnostics": ["clients", "local", "variation", "spectrum"],
        "clients": TRAIN,
        "client_test": HELD_OUT,
    },
    "values": {
        "algorithm": lambda p: algorithms.fedprox(optax.sgd(p["learning_rate"]), mu=p["mu"]),
        "values": {"learning_rate": 0.1, "mu": 0.5},
    },
    "sweep": {
        "algorithm": lambda p: algorithms.fedavg(optax.sgd(p["learning_rate"])),
        "points": fp.grid(seed=[0, 1], learning_rate=[0.1]),
        "replicas": 2,
    },
}
RUNS = ALGORITHMS | UPLOADS | SYSTEMS


def last_states() -> list[Any]:
    """Returns a list that holds the state after the last round of any session from now on."""
    found: list[Any] = []
    stepping = Session.stepping

    def noted(self: Session, *arguments: Any) -> Any:
        state, info = yield from stepping(self, *arguments)
        found[:] = [state]
        return state, info

    Session.stepping = noted
    return found


def fix_salt() -> None:
    """Gives all runs the same salt of their noise.

    It is made from the run's settings, functions and their modules included, so that the noise of a
    private run differs wherever a file has moved.
    """
    session._salter = lambda *facts: lambda values: np.zeros(2, np.uint32)


def arrays(state: Any) -> list[np.ndarray]:
    """Returns the arrays of a pytree, and those of clients whose state is not on the device."""
    here = state.take(range(len(SIZES))) if hasattr(state, "take") else state
    return [np.asarray(x) for x in jax.tree.leaves(here)]


def digest(states: list[Any], rows: list[dict[str, Any]]) -> str:
    """Returns the SHA-256 of states and rows of metrics."""
    total = hashlib.sha256()
    for x in (x for state in states for x in arrays(state)):
        total.update(f"{x.dtype}{x.shape}".encode() + x.tobytes())
    apart = ("time", "lower_is_better")
    clean = [{name: x for name, x in row.items() if name not in apart} for row in rows]
    total.update(json.dumps(clean, sort_keys=True, default=str).encode())
    return total.hexdigest()


def digest_of(options: dict[str, Any], latest: list[Any]) -> str:
    """Returns the digest of a run, or of the runs of a sweep."""
    options = {**DEFAULTS, **options}
    model = options.pop("model")()
    if "points" in options:
        found = fp.sweep(
            model, options.pop("algorithm"), options.pop("clients"), **run_options(**options)
        ).runs
        runs = [found[name] for name in sorted(found)]  # they are listed as they have finished
        states = [x for run in runs for x in (run.server, run.client_state)]
        return digest(states, [row for run in runs for row in run.metrics])
    run = fp.simulate(
        model, options.pop("algorithm"), options.pop("clients"), **run_options(**options)
    )
    (state,) = latest
    parts = [state.server, state.client_state, state.transform_state, state.aggregator_state]
    return digest(parts, run.metrics)


def digests_in(checkout: str, *text: str) -> dict[str, str]:
    """Returns the digests by the script in a checkout, with the package that lies there."""
    folder = Path(checkout).resolve()
    here, before = Path("tests/tools/digests.py"), Path("tests/digests.py")
    script = here if (folder / here).exists() else before  # where older checkouts have it
    command = [sys.executable, str(script), *text]
    paths = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=paths, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def compare(old: str, new: str, *text: str) -> int:
    """Prints the runs whose digests differ between two checkouts; returns 1 if there are any."""
    before, after = digests_in(old, *text), digests_in(new, *text)
    differ = [name for name in before | after if before.get(name) != after.get(name)]
    for name in differ:
        print(f"{name}: {before.get(name, 'no such run')} -> {after.get(name, 'no such run')}")
    print(f"{len(differ)} of {len(before | after)} digests differ.")
    return 1 if differ else 0


def main(arguments: list[str]) -> int:
    """Does what the head of this file says; returns the exit code."""
    if len(arguments) > 1:
        return compare(*arguments)
    chosen = {name: run for name, run in RUNS.items() if not arguments or arguments[0] in name}
    latest = last_states()
    fix_salt()
    print(json.dumps({name: digest_of(run, latest) for name, run in chosen.items()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
