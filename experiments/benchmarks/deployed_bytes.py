"""Bytes that real clients and their server send each other, beside the bytes that a run counts.

    python experiments/benchmarks/deployed_bytes.py

The server and four clients of a deployed run work in one process, without Flower: the messages
between them are those that Flower carries. The model has one layer of width 128, LoRA of rank 8 on
query and value, and a head. The script prints a table of round 1: a client's bytes by the run's
rows, and those of its messages.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import harness
import numpy as np

import fedjax_peft as fp
from fedjax_peft.deploy.client import Client
from fedjax_peft.deploy.server import serve
from fedjax_peft.simulation.simulate import arguments


class Exchange:
    """The way between a server and clients of the same process, which counts bytes."""

    def __init__(self, clients: list[Client]):
        self._clients = clients
        self.up, self.down = 0, 0
        """Of the first client in round 1."""

    def greet(self, request: bytes, clients: int) -> dict[int, bytes]:
        """Returns what clients say of themselves."""
        return {one.number: one.hello(request) for one in self._clients}

    def train(
        self, round_index: int, message: bytes, kept: Mapping[int, int]
    ) -> Iterator[tuple[int, bytes]]:
        """Yields the clients' uploads."""
        for number in sorted(kept):
            answer = self._clients[number].train(message, kept[number])
            if round_index == 1 and number == 0:
                self.up, self.down = len(answer), len(message)
            yield number, answer


def measured(algorithm: Any, rounds: int, **options: Any) -> tuple[int, int, int, int]:
    """Returns a client's bytes up (by the rows, sent) and down (likewise) in round 1."""
    plain = fp.testing.tiny_model(hidden_size=128, num_hidden_layers=1)
    model = fp.attach(plain, fp.lora(rank=8))
    federation = fp.partition.iid(fp.testing.tiny_dataset(96), 4)
    how = {"rounds": rounds, "batch_size": 8, "local_steps": 1, **options}
    with tempfile.TemporaryDirectory() as folder:
        clients = []
        for number, rows in enumerate(federation.indices):
            own = fp.Clients(federation.data.take(rows), (np.arange(len(rows), dtype=np.int32),))
            given = arguments(model, algorithm, own, **how)
            clients.append(Client(given, number, Path(folder)))
        nobody = fp.Clients(federation.data.take([0]), (np.zeros(1, np.int32),))
        given = arguments(model, algorithm, nobody, **how)
        exchange = Exchange(clients)
        row = serve(given, exchange, len(clients)).metrics[1]
    counted = (row["bytes_up"] // len(clients), row["bytes_down"] // len(clients))
    return counted[0], exchange.up, counted[1], exchange.down


def main() -> None:
    """Prints the table."""
    a: argparse.Namespace = harness.arguments(__doc__, rounds=1).parse_args()
    sgd = fp.optimizers.sgd(0.1)
    fedavg = fp.algorithms.fedavg(sgd)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "FedAvg": (fedavg, {}),
        "FRA": (fp.algorithms.fedavg(sgd, aggregator=fp.aggregators.fra()), {}),
        "SCAFFOLD": (fp.algorithms.scaffold(sgd, learning_rate=0.1), {}),
        "FedAvg, `int8`": (fedavg, {"transforms": fp.transforms.int8()}),
        "FedAvg, `top_k(0.1)`": (fedavg, {"transforms": fp.transforms.top_k(0.1)}),
    }
    rows = []
    for name, (algorithm, options) in cases.items():
        numbers = measured(algorithm, a.rounds, **options)
        rows.append((name, *(f"{x:,}" for x in numbers)))
        print(*rows[-1], flush=True)
    print(harness.markdown(("", "`bytes_up`", "sent", "`bytes_down`", "sent"), rows))


if __name__ == "__main__":
    main()
