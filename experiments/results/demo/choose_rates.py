"""Chooses the demo's learning rates on validation data, and explains the dip at round 3.

    python experiments/results/demo/choose_rates.py --seeds 0 --rates 8e-3 4e-3 2e-3

400 training documents are held out for validation; the test documents are not used. Time: about a
minute per run on two CPU cores, so ten minutes for this command.
"""

import argparse

import numpy as np
import optax

import fedjax_peft as fp
from fedjax_peft.engine.schedule import Schedule

METHODS = {
    "FedLR": (fp.lora(rank=8), fp.aggregators.mean()),
    "FeDeRA": (fp.lora(rank=8, init="svd"), fp.aggregators.mean()),
    "FRA-LoRA": (fp.lora(rank=8), fp.aggregators.fra()),
}


def label_skew(clients, seed):
    """Prints the distance between the labels of each round's cohort and those of all documents."""
    work = {"batch_size": 16, "epochs": 1, "local_steps": 4, "seed": seed}
    schedule = Schedule(clients.indices, 10, **work).for_rounds(6)
    labels, classes = clients.data.labels, len(clients.data.label_names)
    share = np.bincount(labels, minlength=classes) / len(labels)
    for round_index in range(1, 7):
        rows = np.concatenate([clients.indices[c] for c in schedule.present(round_index)])
        cohort = np.bincount(labels[rows], minlength=classes) / len(rows)
        distance, missing = np.abs(cohort - share).sum() / 2, int((cohort < 0.01).sum())
        print(f"seed {seed} round {round_index}: distance {distance:.2f}, below 1 %: {missing}")


def main():
    """Prints the label skew of the cohorts, and validation accuracy and loss after each round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[8e-3, 4e-3, 2e-3])
    options = parser.parse_args()
    tokenizer = fp.load_tokenizer("minilm-l6")
    train = fp.load_dataset("20newsgroups", tokenizer=tokenizer, max_length=48)["train"]
    order = np.random.default_rng(7).permutation(len(train))
    validation, rest = train.take(np.sort(order[:400])), train.take(np.sort(order[400:]))
    base = fp.load_model("minilm-l6", head=fp.heads.classification(train.label_names))
    for seed in options.seeds:
        label_skew(fp.partition.dirichlet(train, clients=100, alpha=1.0, seed=seed), seed)
        clients = fp.partition.dirichlet(rest, clients=100, alpha=1.0, seed=seed)
        for rate in options.rates:
            for name, (method, aggregator) in METHODS.items():
                run = fp.simulate(
                    fp.attach(base, method, seed=seed),
                    fp.algorithms.fedavg(optax.adamw(rate), aggregator=aggregator),
                    clients,
                    test=validation,
                    rounds=6,
                    clients_per_round=10,
                    local_steps=4,
                    seed=seed,
                )
                accuracy = " ".join(f"{row['test_accuracy']:.3f}" for row in run.metrics)
                loss = " ".join(f"{row['test_loss']:.2f}" for row in run.metrics)
                print(f"seed {seed} rate {rate:g} {name}: accuracy {accuracy}; loss {loss}")


if __name__ == "__main__":
    main()
