"""Learns, through the rounds, how far each layer of a client's model should be its own.

Every client has a personal copy v of the shared adapters and head w, and predicts with a mixture
that has a weight a of its own for each layer: ``a v + (1 - a) w``. Local training is that of APFL
(Deng et al. 2020): w follows its own loss, v the loss of the mixture. The weights a are learned by
gradient descent on the clients' validation loss after some rounds, through all their local steps.

    python experiments/gradients/mixing.py

It checks the gradient by finite differences, learns, and writes results/mixing.json and .png.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedjax_peft as fp
from fedjax_peft import aggregators
from fedjax_peft.algorithms.common import replace_server
from fedjax_peft.contracts import Algorithm, ClientUpdate, Roles
from fedjax_peft.engine import differentiable

GROUPS = ("layer.0", "layer.1", "head")
RESULTS = Path(__file__).parent / "results"


def group(name):
    """Returns the group of a leaf, by its name."""
    return next((g for g in GROUPS if f".{g}." in name), "head")


def mixing(values, rate=0.5):
    """Returns the algorithm; ``values`` are the logits of the personal model's part in a group."""
    part = {g: jax.nn.sigmoid(jnp.float32(values[g])) for g in GROUPS}

    def mixture(w, v):
        return {n: part[group(n)] * v[n] + (1 - part[group(n)]) * w[n] for n in w}

    def client(context):
        def step(local, batch, key):
            w, v = local
            mixed, metrics = context.gradient(context.objective, mixture(w, v), batch, key)
            alone, _ = context.gradient(context.objective, w, batch, key)
            v = {n: x - rate * part[group(n)] * mixed[n] for n, x in v.items()}
            return ({n: x - rate * alone[n] for n, x in w.items()}, v), metrics

        return ClientUpdate(lambda w, v, key: (w, v), step, lambda local: local)

    return Algorithm(
        "mixing",
        Roles(shared=("^adapter:", "^head:"), fixed=("^fixed:",)),
        client,
        aggregators.mean(error=False),
        replace_server(),
        init_client_state=lambda shared, private: shared,
        model=mixture,
        personal=True,
        gradients_per_step=2,
    )


def federation(clients, examples):
    """Returns skewed clients, and each client's rows for validation and for the test."""
    data = fp.testing.tiny_dataset(clients * examples, seed=0)
    whole = fp.partition.dirichlet(data, clients=clients, alpha=0.3, seed=0)
    thirds = [np.array_split(np.random.default_rng(0).permutation(r), 3) for r in whole.indices]
    train, validation, test = zip(*thirds, strict=True)
    return fp.Clients(data, train), dict(enumerate(validation)), dict(enumerate(test))


def main():
    """Checks, learns and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--examples", type=int, default=60, help="per client on average")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=25, help="of the mixing weights")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = fp.attach(fp.testing.tiny_model(**off), fp.lora(rank=4))
    clients, validation, test = federation(args.clients, args.examples)
    session = fp.session(
        *(model, mixing, clients),
        sampling="all",
        batch_size=8,
        local_steps=4,
        values=dict.fromkeys(GROUPS, 0.0),
    )
    run = differentiable.rounds(session, args.rounds)
    losses = [differentiable.loss(session, clients.data, rows=r) for r in (validation, test)]

    def after(values):
        state = run(values=values)
        return losses[0](state), losses[1](state)

    slope = jax.jit(jax.value_and_grad(after, has_aux=True))
    measure = jax.jit(after)

    values = dict(run.values)
    (_, _), gradient = slope(values)
    checks = {}
    for g in GROUPS:
        along = {n: jnp.float32(n == g) for n in GROUPS}
        steps = differentiable.directional(lambda x: measure(x)[0], values, along, step=0.3)
        checks[g] = (float(gradient[g]), steps)
        print(f"{g:8} gradient {checks[g][0]:+.6f}  finite differences {steps:+.6f}")

    optimizer = optax.adam(0.3)
    momentum, rows = optimizer.init(values), []
    for i in range(args.steps + 1):
        (validated, tested), gradient = slope(values)
        parts = {g: float(jax.nn.sigmoid(values[g])) for g in GROUPS}
        rows.append({"step": i, "validation": float(validated), "test": float(tested), **parts})
        updates, momentum = optimizer.update(gradient, momentum)
        values = optax.apply_updates(values, updates)
    fixed = {}
    for name, logit in {"global only": -20.0, "half": 0.0, "personal only": 20.0}.items():
        fixed[name] = [float(x) for x in measure(dict.fromkeys(GROUPS, jnp.float32(logit)))]
    fixed["learned"] = [rows[-1]["validation"], rows[-1]["test"]]
    print("\n| mixing weights | validation loss | test loss |\n|---|---|---|")
    for name, (validated, tested) in fixed.items():
        print(f"| {name} | {validated:.4f} | {tested:.4f} |")
    print({g: round(rows[-1][g], 3) for g in GROUPS})
    args.out.mkdir(parents=True, exist_ok=True)
    found = {"checks": checks, "rows": rows, "fixed": fixed}
    (args.out / "mixing.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, args.out / "mixing.png")


def draw(found, path):
    """Writes the figure: the weights of the groups, and the losses, at each step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    steps = [row["step"] for row in found["rows"]]
    for g, style in zip(GROUPS, ("o-", "s--", "^:"), strict=True):
        left.plot(steps, [row[g] for row in found["rows"]], style, markersize=3, label=g)
    left.set(xlabel="step", ylabel="personal model's part", ylim=(0, 1))
    left.legend()
    for name, style in {"validation": "-", "test": "--"}.items():
        right.plot(steps, [row[name] for row in found["rows"]], style, label=f"{name}, learned")
    # "global only" is far above the others; the table has it.
    for name, style in {"half": "-.", "personal only": ":"}.items():
        right.axhline(found["fixed"][name][1], linestyle=style, color="grey", label=f"test, {name}")
    right.set(xlabel="step", ylabel="mean loss of the clients")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
