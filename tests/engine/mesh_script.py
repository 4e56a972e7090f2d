"""Runs on eight virtual devices, in a process of its own; see test_engine_meshes.py.

It reads names of runs, such as ``ditto-8-2-tensor``, and prints what it has found, in a line each.
"""

import functools
import json
import re
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import lowering  # noqa: F401
import numpy as np
import optax
import reordering  # noqa: F401
import test_engine_client_store as stores
import toy
from options import run_options, session_options

import fedjax_peft as fp
from fedjax_peft import Dataset, InputError, simulate, tasks
from fedjax_peft.engine.computation import Computation
from fedjax_peft.engine.session import Session
from fedjax_peft.testing import TINY_LLAMA

jax.config.update("jax_numpy_rank_promotion", "raise")
# 17 clients are 24 rows on 8 devices, 6 clients a round are 8; no other axis has 24 entries.
FEDERATION = toy.clients([7, 4, 12, 1, 9, 6, 3, 5, 10, 2, 6, 8, 11, 1, 2, 3, 4])
TEST = toy.dataset(26, seed=7)
SPLITS = ((r"layer\.kernel", 1), (r"layer\.lora_b", 1))
OPTIONS = {"clients_per_round": 6, "batch_size": 4, "lanes": 8}
MODEL = toy.model(features=5, width=8).replace(splits=SPLITS)
DITTO = fp.algorithms.ditto(optax.adam(0.02))
ONE = {"devices": 1}


def mesh(model_parallel, model_sharding="tensor"):
    return {"devices": 8, "model_parallel": model_parallel, "model_sharding": model_sharding}


def farthest(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max((float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs), default=0.0)


def trained(session, rounds=2):
    return reported(session, rounds)[0]


def reported(session, rounds=2):
    """Returns the state after some rounds, and what was measured in the last one."""
    state = session.init(3)
    for _ in range(rounds):
        state, info = session.step(state)
    return state, (info.norms[:6], info.aggregation)


def results(session, state, measured, **options):
    """Returns what a user can read: parameters, the clients' state, measurements, scores."""
    rows = session.trimmed(state)
    scores = session.evaluate(state, TEST, **options)
    found = (rows.server, rows.client_state, rows.transform_state, measured, scores)
    return jax.device_get(found)


def compiled(session):
    [program] = session._programs.values()
    return program._compiled


# FRA gives up the basis of what error feedback keeps; here a memory has to be somewhere.
warnings.filterwarnings("ignore", "The aggregator 'fra' factors LoRA's products anew")
FEEDBACK = [fp.transforms.clip_norm(0.2), fp.transforms.top_k(0.5, error_feedback=True)]
FRA = fp.algorithms.fedavg(optax.sgd(0.05), aggregator=fp.aggregators.fra())
ALGORITHMS = {  # the algorithm, options of the session, options of the evaluation
    "ditto": (DITTO, {}, {"clients": [0, 16]}),
    "fra": (FRA, {"transforms": FEEDBACK}, {}),
}


@functools.cache
def toy_run_alone(name):
    """Returns the results of one device, and how far the model has moved."""
    algorithm, options, tested = ALGORITHMS[name]
    alone = fp.session(MODEL, algorithm, FEDERATION, **session_options(**ONE, **OPTIONS, **options))
    expected = results(alone, *reported(alone), **tested)
    return expected, farthest(expected[0], alone.init(3).server)


def toy_run(run):
    name, _, parts, form = run.split("-")
    expected, moved = toy_run_alone(name)
    algorithm, options, tested = ALGORITHMS[name]
    options = {**OPTIONS, **options, **mesh(int(parts), form)}
    session = fp.session(MODEL, algorithm, FEDERATION, **session_options(**options))
    state, measured = reported(session)
    text = compiled(session).as_text()
    kept = (state.client_state, state.transform_state and state.transform_state.memory)
    leaves, kernel = jax.tree.leaves(kept), session.setup.frozen["layer.kernel"]
    return {
        "far": farthest(expected, results(session, state, measured, **tested)),
        "moved": moved,
        "whole": [x.shape for x in leaves if f"f32[{','.join(map(str, x.shape))}]" in text],
        "rows": [x.addressable_shards[0].data.shape[0] for x in leaves],
        "kernel": kernel.addressable_shards[0].data.shape,
        "partitions": int(re.search(r"num_partitions=(\d+)", text)[1]),
        "spread": len(jax.tree.leaves(state.server)[0].sharding.device_set),
        "all_reduce": "all-reduce" in text,
        "lanes": session.lanes(3),
        # What a device computes in a step: [lanes, examples, classes]. The compiler may drop the
        # axis of a single lane from the features.
        "batches": sorted({*re.findall(r"f32\[(\d+),4,3\]", text)}),
    }


def refused(_):
    found = {}
    for key, bad in {"lanes": {"lanes": 6}, "devices": {"devices": 9}}.items():
        try:
            fp.session(MODEL, DITTO, FEDERATION, **session_options(**{**OPTIONS, **mesh(1), **bad}))
        except InputError as error:
            found[key] = str(error)
    return found


def stored(_):
    """The cohort's rows and those of an evaluation are split evenly over four devices."""
    model, options = stores.model(), {"devices": 4, "lanes": 4, "clients_per_round": 3}
    found = (stores.rounds("both", place, model, **options) for place in ("device", "host"))
    return {"far": farthest(*found)}


def ranks(_):
    """Two clients of rank 1 fill two of FRA's four directions; FFA keeps the A of all four."""
    algorithm, model = fp.algorithms.fra_ffa(optax.adam(0.05), at=1), toy.model(rank=4, dropout=0)
    zero_b = {"layer.lora_b": np.zeros((4, toy.WIDTH), np.float32)}
    model = model.replace(trainable=model.trainable | zero_b)
    options = OPTIONS | {"clients_per_round": 2, "client_ranks": [1]}
    found = []
    for place in ({**ONE, "lanes": 1}, mesh(1)):
        session = fp.session(
            model, algorithm, FEDERATION, **session_options(**{**options, **place})
        )
        found.append(jax.device_get(trained(session).server["model"]))
    lengths = {n: np.linalg.norm(found[0][f"layer.lora_{n}"], axis="ab".index(n)) for n in "ab"}
    return {"far": farthest(*found), **{n: x.tolist() for n, x in lengths.items()}}


def memory(_):
    """Compares what the program for many clients is given on one device and on eight."""
    federation = toy.clients([1] * 256)
    found = {}
    for chosen in (ONE, mesh(4)):
        session = fp.session(MODEL, DITTO, federation, **session_options(**chosen, **OPTIONS))
        state = session.init(0)
        given = (session.setup.frozen, session.setup.fixed, session.columns, state.on_device())
        shards = [x.addressable_shards[0] for x in jax.tree.leaves(given)]
        found[chosen["devices"]] = sum(shard.data.nbytes for shard in shards)
    owned = sum(x.nbytes for x in jax.tree.leaves(state.client_state))
    return {"saved": found[1] - found[8], "clients": owned}


def resumed(_):
    """Stops a run on one mesh, and goes on with it on another one and on a single device."""

    def run(rounds, **options):
        given = run_options(**OPTIONS, **options)
        return simulate(MODEL, DITTO, FEDERATION, rounds=rounds, **given)

    alone = run(3, **ONE)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run(1, out=out, **mesh(2, "gather"))
        run(2, out=out, resume=True, **mesh(8))
        last = run(3, out=out, resume=True, **ONE)
    far = farthest((alone.params, alone.client_state), (last.params, last.client_state))
    return {"far": far, "rounds": [row["round"] for row in last.metrics]}


def columns(_):
    session = fp.session(MODEL, DITTO, FEDERATION, **session_options(**mesh(4), **OPTIONS))
    everything = FEDERATION.data.columns
    layout = session.setup.layout._replace(whole_columns=0)
    split = Session(
        session.setup._replace(layout=layout), session._leaves, session._schedule, everything,
        Computation(lanes=8),
    )  # fmt: skip
    return {
        "far": farthest(*(s.trimmed(trained(s, 1)).server for s in (session, split))),
        "rows": [len(everything["x"]), split.columns["x"].addressable_shards[0].data.shape[0]],
    }


BATCHES = {"clients_per_round": 8, "batch_size": 4, "lanes": 8, "length_buckets": 0}
STEP = fp.algorithms.fedavg(optax.sgd(0.5))
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@functools.cache
def transformer(name):
    """Returns the arguments of a session; the decoder is quantised, and its layers are stacked.

    So it has the loss and the gradients that these have of their own.
    """
    if name == "bert":
        # Four devices cannot split the rows of its table, as with the 30,522 of the real one.
        model, data = (
            fp.testing.tiny_model(vocab_size=66, **WITHOUT_DROPOUT),
            fp.testing.tiny_dataset(64),
        )
    else:
        config = {**TINY_LLAMA, "num_hidden_layers": 3}
        model = fp.random_model(config, head=fp.heads.causal_lm(), scan_layers=True, quantize="nf4")
        ids = np.random.default_rng(0).integers(3, 60, (64, 12)).astype(np.int32)
        tokens = {"input_ids": ids, "attention_mask": np.ones(ids.shape, bool)}
        data = Dataset(tokens, (), "random", task=tasks.next_token())
    return fp.attach(model, fp.peft.lora(2)), STEP, fp.partition.iid(data, clients=8, seed=0)


@functools.cache
def transformer_alone(name):
    """Returns the server's model after a round on one device, and how far it has moved."""
    alone = fp.session(*transformer(name), **session_options(**ONE, **BATCHES))
    expected = jax.device_get(trained(alone, 1).server)
    return expected, farthest(alone.init(3).server, expected)


def transformer_run(run):
    name, form = run.split("-")
    expected, moved = transformer_alone(name)
    session = fp.session(*transformer(name), **session_options(**mesh(4, form), **BATCHES))
    far = farthest(expected, jax.device_get(trained(session, 1).server))
    text = compiled(session).as_text()
    step = [line for line in text.splitlines() if "while/body" in line]
    frozen = session.setup.frozen.values()
    return {
        "far": far,
        "moved": moved,
        # [lanes on a device, batch, tokens, width]
        "summed": sum(bool(re.search(r"f32\[4,4,12,32\]\S* all-reduce\(", x)) for x in step),
        "gathered": sum(bool(re.search(r"f32\[(32,64|64,32)\]\S* all-gather\(", x)) for x in step),
        # In every step, and not only where a client begins or ends.
        "always": [
            shape
            for line in step
            if "/cond/" not in line
            for shape in re.findall(r"\[([\d,]*)\]\S* all-gather\(", line)
        ],
        # Codes of 4 bits: of the rows of a turn, or of a stack of two layers.
        "codes": re.findall(r"u8\[([\d,]+)\]\S* all-gather\(", text),
        "frozen": sum(x.addressable_shards[0].data.nbytes for x in frozen),
        "all_frozen": sum(x.nbytes for x in frozen),
    }


PARTS = {
    **dict.fromkeys(ALGORITHMS, toy_run),
    **dict.fromkeys(("bert", "decoder"), transformer_run),
    **{part.__name__: part for part in (refused, stored, ranks, memory, resumed, columns)},
}

if __name__ == "__main__":
    for line in sys.stdin:
        run = line.strip()
        print(json.dumps(PARTS[run.split("-")[0]](run)), flush=True)
