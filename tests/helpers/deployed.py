"""A deployed run in one process: real clients and server, and the real bytes between them."""

import json

import jax
import numpy as np

import fedjax_peft as fp
from fedjax_peft.deploy.client import Client
from fedjax_peft.deploy.rounds import Lost
from fedjax_peft.deploy.server import serve
from fedjax_peft.simulation.simulate import arguments
from fedjax_peft.support.errors import InputError


def write_client_texts(folder, clients, **sizes):
    """Writes ``folder/data``, whose texts clients share in turn, and ``client-N.jsonl`` of each."""
    fp.testing.write_tiny_texts(folder / "data", **sizes)
    file = folder / "data" / "train.jsonl"
    lines = file.read_text().splitlines()
    rows = [json.loads(line) | {"client": f"c{i % clients}"} for i, line in enumerate(lines)]
    texts = [json.dumps(row) + "\n" for row in rows]
    file.write_text("".join(texts))
    for client in range(clients):
        (folder / f"client-{client}.jsonl").write_text("".join(texts[client::clients]))


class Exchange:
    """The way between the server and clients of the same process.

    Args:
      clients: made by :func:`client_of`.
      spoil: (round, client, answer) -> the answer that arrives, by default the one that was sent.
    """

    def __init__(self, clients, spoil=lambda index, client, answer: answer):
        self.clients, self.spoil = clients, spoil
        self.up, self.down = {}, {}
        """Bytes on the wire, by round."""

    def greet(self, request, clients):
        return {c.number: c.hello(request) for c in self.clients if c is not None}

    def train(self, round_index, message, kept):
        self.up[round_index], self.down[round_index] = 0, len(message) * len(kept)
        for number in sorted(kept, reverse=True):  # not in the order of the sum
            if self.clients[number] is None:
                yield number, Lost("its SuperNode is not connected")
                continue
            try:
                answer = self.clients[number].train(message, kept[number])
            except InputError as error:
                yield number, Lost(str(error))
                continue
            answer = self.spoil(round_index, number, answer)
            if answer is not None:
                self.up[round_index] += len(answer)
                yield number, answer


def client_of(model, algorithm, federation, number, folder, salt=None, **options):
    """Returns a client with the examples that it has in a simulated federation, alone."""
    rows = federation.indices[number]
    own = fp.Clients(federation.data.take(rows), (np.arange(len(rows), dtype=np.int32),))
    given = arguments(model, algorithm, own, **options)
    return Client(given, number, folder, salt=salt)


def deployed(model, algorithm, federation, folder, spoil=None, salt=None, **options):
    """Returns (run, exchange) of a deployed run; ``folder`` is that of the clients."""
    own = {k: x for k, x in options.items() if k not in ("test", "out", "resume", "evaluation")}
    numbers = range(len(federation))
    made = [client_of(model, algorithm, federation, n, folder, salt, **own) for n in numbers]
    exchange = Exchange(made, *([] if spoil is None else [spoil]))
    return served(model, algorithm, exchange, **options), exchange


def served(model, algorithm, exchange, **options):
    """Returns the run of a server; it has none of the clients' examples."""
    nothing = fp.Dataset({"labels": np.zeros(1, np.int32)}, ("nothing",))
    nobody = fp.Clients(nothing, (np.zeros(1, np.int32),))
    given = arguments(model, algorithm, nobody, **options)
    return serve(given, exchange, len(exchange.clients))


def kept(exchange, number, round_index):
    """Returns what a client keeps after a round."""
    client = exchange.clients[number]
    ((session, _, _),) = client._made.values()
    run = next(path for path in (client._folder / f"client-{number}").iterdir() if path.is_dir())
    return jax.device_get(client._restored(session, run.name, round_index, round_index + 1))
