"""What several rounds as one program would gain: the federation of `scaling.py`.

Three loops run the same rounds in turn. The first waits for each round, so the host's work adds to
the device's. The second is that of `fp.simulate`: the host plans the next round while the device
computes. In the third, one program scans over the plans of eight rounds.

    python experiments/benchmarks/rounds_per_call.py
"""

import argparse
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scaling import TASK, make_federation

import fedjax_peft as fp
from fedjax_peft.engine.round import build_round

TOGETHER = 8


def prepare(cohort, rounds):
    """Returns a session on the tiny transformer; all clients take part in every round."""
    model, clients = make_federation(cohort)
    return fp.session(
        *(model, fp.algorithms.fedavg(optax.sgd(TASK["rate"])), clients),
        batch_size=TASK["batch"],
        local_steps=TASK["steps"],
        rounds=rounds,
    )


def apart(session, rounds, wait):
    """Returns the state after these rounds, each of which is a program's call."""
    state = session.init(seed=0)
    for _ in range(rounds):
        state, _ = session.step(state)
        if wait:
            jax.block_until_ready(state.server)
    return jax.block_until_ready(state.server)


def scan_of(session):
    """Returns (state, plans, first round) -> state, a compiled scan over several rounds."""
    program = session.program(session.plan(1))
    *constants, _, _, key, _ = program._arguments(session.init(seed=0), session.plan(1), 1)
    round_ = build_round(session.setup)

    def rounds(state, plans, first, constants, key):
        def body(state, given):
            result = round_(*constants, state, given[0], key, given[1])
            return result.state, (result.sums, result.finite, result.norms)

        return jax.lax.scan(body, state, (plans, first + jnp.arange(TOGETHER, dtype=jnp.int32)))

    compiled = jax.jit(rounds, donate_argnums=0)
    return lambda *given: compiled(*given, constants, key)[0]


def together(session, scan, rounds):
    """Returns the state after these rounds, several of which are a program's call."""
    state = session.init(seed=0).on_device()
    for first in range(1, rounds + 1, TOGETHER):
        plans = [session.plan(first + i) for i in range(TOGETHER)]
        state = scan(state, jax.tree.map(lambda *x: np.stack(x), *plans), jnp.int32(first))
    return jax.block_until_ready(state.server)


def main():
    """Prints the medians in milliseconds as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 30, 100])
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    print("| clients | each waited for | one after the other | eight a call | same bits |")
    print("|---|---|---|---|---|")
    for cohort in given.cohorts:
        session = prepare(cohort, given.rounds)
        rounds = given.rounds
        ways = [
            partial(apart, session, rounds, wait=True),
            partial(apart, session, rounds, wait=False),
            partial(together, session, scan_of(session), rounds),
        ]
        models = [way() for way in ways]  # compiles
        same = jax.tree.map(lambda x, y: np.array_equal(x, y), models[1], models[2])
        seconds = [[], [], []]
        for _ in range(given.repeats):
            for way, found in zip(ways, seconds, strict=True):
                began = time.perf_counter()
                way()
                found.append((time.perf_counter() - began) / rounds)
        cells = [f"{statistics.median(found) * 1e3:.2f}" for found in seconds]
        print("|", " | ".join([str(cohort), *cells, str(all(jax.tree.leaves(same)))]), "|")


if __name__ == "__main__":
    main()
