"""Compares rounds on SST-2 with steps of different lengths with padding to 128 tokens.

MiniLM-L6 with LoRA of rank 8, ten clients, one lane. The same rounds, with the same examples and
random numbers, run with ``length_buckets=4`` (the default), 1 (all texts padded to the longest one)
and 0 (all padded to 128, as in other frameworks). The three run alternately. The table has the
median training seconds of a round, the compilation time, and the difference of the losses.

    python experiments/benchmarks/length_buckets.py                     # SST-2 from the hub
    python experiments/benchmarks/length_buckets.py --source DIR        # from files
"""

import argparse
import statistics

import optax

import fedjax_peft as fp

BUCKETS = (4, 1, 0)


def main() -> None:
    """Runs the three settings and prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default="auto", help="as for load_dataset")
    parser.add_argument("--name", default="sst2", help="another data set")
    options = {"length": 128, "rounds": 2, "steps": 4, "batch": 16, "repeats": 2}
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    a = parser.parse_args()

    tokenizer = fp.load_tokenizer("minilm-l6")
    data = fp.load_dataset(a.name, tokenizer=tokenizer, max_length=a.length, source=a.source)
    train = data["train"]
    model = fp.load_model("minilm-l6", head=fp.heads.classification(train.label_names))
    model = fp.attach(model, fp.lora(rank=8))
    clients = fp.partition.iid(train, clients=10)
    seconds: dict[int, list[float]] = {n: [] for n in BUCKETS}
    compiling: dict[int, float] = {}
    shares: dict[int, float] = {}
    losses: dict[int, list[float]] = {}
    for _ in range(a.repeats):
        for buckets in BUCKETS:
            run = fp.simulate(
                model,
                fp.algorithms.fedavg(optax.adamw(1e-3)),
                clients,
                rounds=a.rounds,
                batch_size=a.batch,
                local_steps=a.steps,
                placement=fp.Placement(lanes=1, length_buckets=buckets),
            )
            rows = run.metrics[1:]
            seconds[buckets] += [row["time"]["train_s"] for row in rows]
            compiling[buckets] = rows[0]["time"]["compile_s"]
            shares[buckets] = statistics.mean(row["padding_share"] for row in rows)
            losses[buckets] = [row["train_loss"] for row in rows]
    longest = int(train.columns["attention_mask"].sum(1).max())
    mean = float(train.columns["attention_mask"].sum(1).mean())
    print(f"{len(train)} texts of {mean:.1f} tokens on average, the longest {longest}\n")
    print("| length_buckets | round, s | speed | padding | compilation, s | losses differ by |")
    print("|---|---|---|---|---|---|")
    full = statistics.median(seconds[0])
    for buckets in BUCKETS:
        median = statistics.median(seconds[buckets])
        apart = max(abs(x - y) for x, y in zip(losses[0], losses[buckets], strict=True))
        print(
            f"| {buckets} | {median:.2f} | {full / median:.2f} | {100 * shares[buckets]:.0f} %"
            f" | {compiling[buckets]:.1f} | {apart:.1e} |"
        )


if __name__ == "__main__":
    main()
