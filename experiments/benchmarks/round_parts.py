"""Says where the milliseconds of a round of a tiny model go: host, dispatch, arithmetic.

    python experiments/benchmarks/round_parts.py --repeats 300

The task is that of ``scaling.py``. Calls of all rows take turns, and the table has medians:

* *a round*: ``session.step``, until the new state is there;
* *the same with its plan given*: the host makes no plan;
* *the same with a lane for each client*: a round, in more lanes than are chosen automatically;
* *the plan*: ``session.plan``, which the first row computes while the device works;
* *plain, with its plan*: the same steps in 20 lines of JAX, all clients under one ``vmap`` and one
  ``jit``; it gets the same plan as new arrays in every round, as any simulation must;
* *plain, nothing new*: the same call with arrays that are on the device already;
* *plain, in one loop*: the rounds of a ``lax.scan`` on the device, so without any call. This is
  the arithmetic alone, on this processor by this compiler.

A plain round has the loss of ours, to 1e-4 relatively (checked at the start).
"""

import time

import harness
from scaling import TASK, make_federation

COHORTS = (10, 100)
ROUNDS = 20
"""Of the loop on the device."""
FILE = harness.RESULTS / "round_parts.json"


def plain(model, columns):
    """Returns a round of FedAvg: (leaves, rows ``[clients, steps, batch]``) -> (leaves, loss)."""
    import jax
    import jax.numpy as jnp
    import optax

    def loss(leaves, batch):
        logits = model.apply(model.frozen, leaves, batch, None, False).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def client(leaves, rows):
        def step(leaves, rows):
            batch = {name: column[rows] for name, column in columns.items()}
            value, grads = jax.value_and_grad(loss)(leaves, batch)
            return jax.tree.map(lambda x, g: x - TASK["rate"] * g, leaves, grads), value

        return jax.lax.scan(step, leaves, rows)

    def round_(leaves, rows):
        uploads, losses = jax.vmap(client, in_axes=(None, 0))(leaves, rows)
        return jax.tree.map(lambda x: x.mean(axis=0), uploads), jnp.mean(losses)

    return round_


def measure(cohort, clients, repeats):
    """Returns the milliseconds of every row with one cohort, and the lanes of our round."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import fedjax_peft as fp

    model, federation = make_federation(clients)

    def made(lanes):
        return fp.session(
            *(model, fp.algorithms.fedavg(optax.sgd(TASK["rate"])), federation),
            clients_per_round=cohort,
            batch_size=TASK["batch"],
            local_steps=TASK["steps"],
            rounds=4_000,
            placement=fp.Placement(lanes=lanes),
        )

    session, wide = made("auto"), made(cohort)
    held = np.stack(federation.indices)
    columns = {name: jnp.asarray(x) for name, x in federation.data.columns.items()}
    round_ = plain(model, columns)
    once = jax.jit(round_, donate_argnums=0)

    @jax.jit
    def loop(leaves, rows):
        return jax.lax.scan(lambda leaves, _: round_(leaves, rows), leaves, length=ROUNDS)

    def rows_of(plan):  # a client's two steps both see all of its four examples
        return np.repeat(held[plan.client[:cohort]][:, None], TASK["steps"], axis=1)

    def fresh():
        return jax.tree.map(jnp.copy, dict(model.trainable))

    state, leaves = session.init(seed=0), fresh()
    first = session.plan(1, 0)
    state, info = session.step(state, first)
    leaves, value = once(leaves, rows_of(first))
    total, count = info.sums["loss"]
    ours = float(np.sum(total) / np.sum(count))
    assert abs(ours - float(value)) < 1e-4 * ours, (ours, float(value))
    there, held_state = jnp.asarray(rows_of(first)), [state, leaves, fresh(), wide.init(seed=0)]

    def step(plan=None):
        held_state[0], info = session.step(held_state[0], plan)
        return held_state[0].server, info.norms

    def step_in_lanes():
        held_state[3], info = wide.step(held_state[3])
        return held_state[3].server, info.norms

    def bare(rows):
        held_state[1], value = once(held_state[1], rows)
        return held_state[1], value

    def milliseconds(run, calls=1):
        return lambda: 1e3 * harness.timed(run) / calls

    def planned():  # a plan that nobody has made yet
        began = time.perf_counter()
        session.plan(next(numbers), 0)
        return 1e3 * (time.perf_counter() - began)

    numbers = iter(range(2_000, 4_000))
    rows = {
        "a round": milliseconds(step),
        "the same with its plan given": milliseconds(lambda: step(first)),
        "the same with a lane for each client": milliseconds(step_in_lanes),
        "the plan": planned,
        "plain, with its plan": milliseconds(lambda: bare(rows_of(first))),
        "plain, nothing new": milliseconds(lambda: bare(there)),
        "plain, in one loop": milliseconds(lambda: loop(held_state[2], there), ROUNDS),
    }
    found = harness.turns(rows, repeats, warm=5)
    return {name: float(np.median(x)) for name, x in found.items()} | {"lanes": session.lanes()}


def main():
    """Measures the cohorts, and writes JSON and a table."""
    options = harness.arguments(__doc__, clients=10_000, repeats=300)
    args = options.parse_args()
    rows = []
    for cohort in COHORTS:
        repeats = max(7, args.repeats * 10 // cohort)
        found = measure(cohort, args.clients, repeats)
        rows.append({"cohort": cohort, "repeats": repeats, **found})
        print(rows[-1])
    harness.write(FILE, rows)


if __name__ == "__main__":
    main()
