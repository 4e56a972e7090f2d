"""Times a round with each compressor against a round without, on a small transformer.

The rounds run in turns, so that a busy machine slows all of them. Printed are medians of the
ratios, the bytes of one upload and the relative error. A compressor's part is a fixed cost for each
client, so its share is largest here, where a local round is two steps of a tiny model.

    python experiments/benchmarks/compressors.py
"""

import argparse
import statistics
import time

import jax
import optax

import fedjax_peft as fp
from fedjax_peft import transforms
from fedjax_peft.simulation.cost import forecast


def compressors() -> dict[str, list]:
    """Returns name -> upload transforms."""
    return {
        "none": [],
        "quantize 8": [transforms.quantize(8)],
        "quantize 4": [transforms.quantize(4)],
        "int8": [transforms.int8()],
        "nf4": [transforms.nf4()],
        "sign": [transforms.sign()],
        "ternary": [transforms.ternary()],
        "top_k 10 %": [transforms.top_k(0.1)],
        "top_k 10 %, quantize 4": [transforms.top_k(0.1), transforms.quantize(4)],
        "random_k 10 %": [transforms.random_k(0.1)],
        "top_directions 2 of 8": [transforms.top_directions(2)],
        "power_sgd 1": [transforms.power_sgd(1)],
        "flasc 25 %": [transforms.flasc()],
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="default 15")
    parser.add_argument("--steps", type=int, default=2, help="local steps; default 2")
    parser.add_argument("--only", default="", help="only the compressors with this in their name")
    a = parser.parse_args()
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 2}
    config = {**fp.testing.TINY_BERT, **shape, "num_hidden_layers": 2}
    model = fp.attach(fp.random_model(config, head=fp.heads.classification(4)), fp.lora(rank=8))
    clients = fp.partition.iid(fp.testing.tiny_dataset(320), clients=10)
    fedavg = fp.algorithms.fedavg(optax.adamw(1e-3))
    options = {"clients_per_round": 5, "local_steps": a.steps}
    options["placement"] = fp.Placement(lanes=1)
    plain = fp.session(model, fedavg, clients, **options)
    start = plain.init(0)
    print(f"{'compressor':24} {'ms a round':>10} {'times none':>10} {'bytes':>7} {'error':>6}")
    for name, given in compressors().items():
        if a.only not in name:
            continue
        made = fp.session(model, fedavg, clients, transforms=given, **options)
        states, seconds = [start.copy(), made.init(0)], ([], [])
        for turn in range(a.rounds + 1):  # the first turn compiles
            for i, session in enumerate((plain, made)):
                began = time.perf_counter()
                states[i], info = session.step(states[i])
                jax.block_until_ready(states[i].server)
                if turn:
                    seconds[i].append(time.perf_counter() - began)
        ratio = statistics.median(x / y for x, y in zip(seconds[1], seconds[0], strict=True))
        transform = transforms.chain(*given) if given else None
        costs = forecast(model, fedavg, clients=1, rounds=1, steps=1, transform=transform)
        error, middle = (
            info.aggregation.get("compression_error", 0.0),
            statistics.median(seconds[1]),
        )
        row = f"{1e3 * middle:10.1f} {ratio:10.2f} {costs.bytes_up:7,} {float(error):6.3f}"
        print(f"{name:24} {row}", flush=True)


if __name__ == "__main__":
    main()
