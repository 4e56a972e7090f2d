"""Asynchronous runs against a slow reference, written from the papers' algorithm boxes."""

import functools
import math

import linear
import numpy as np
import optax
import pytest
import toy
from closeness import approx, assert_close
from options import run_options

import fedjax_peft as fp
from fedjax_peft.engine.plan import batches
from fedjax_peft.numerics.random import host_rng

pytestmark = pytest.mark.slow

SIZES = [5, 9, 12, 7, 20, 3]
TIME = fp.TimeModel(seconds_per_step=1.0, spread=1.0)
RATE, LAM, BATCH, SEED = 0.3, 0.5, 4, 3
FEDAVG = fp.algorithms.fedavg(optax.sgd(RATE))
DITTO = fp.algorithms.ditto(optax.sgd(RATE), lam=LAM)
model = functools.cache(linear.model)


class Reference:
    """One event at a time: a client trains at the moment at which it starts.

    Its random choices are told: ``draw`` says which client starts next. It knows nothing of lanes,
    plans, histories or buffers of jobs.
    """

    def __init__(self, server, clients, concurrency, draw, *, ditto=False):
        self.server, self.clients, self.draw, self.ditto = server, clients, draw, ditto
        self.concurrency = concurrency
        self.x = {n: np.array(v, np.float64) for n, v in model().trainable.items()}
        self.personal = [dict(self.x) for _ in clients.indices]
        self.version, self.now = 0, 0.0
        self.at_work, self.buffer, self.waiting = [], [], set()
        self.rows = []

    def train(self, client):
        """Returns the client's model, and its personal model, after local SGD."""
        rng = host_rng(SEED, "order", len(self.rows) + 1, client)
        w, v, start = dict(self.x), dict(self.personal[client]), dict(self.x)
        for rows in batches(self.clients.indices[client], BATCH, rng=rng):
            rows = rows[rows >= 0]
            data = self.clients.data.columns
            x, y = data["x"][rows].astype(np.float64), data["labels"][rows]
            g = linear.gradient(w, x, y)
            if self.ditto:
                h = linear.gradient(v, x, y)
                v = {n: v[n] - RATE * (h[n] + LAM * (v[n] - start[n])) for n in v}
            w = {n: w[n] - RATE * g[n] for n in w}
        return w, v

    def seconds(self, client):
        steps = -(-len(self.clients.indices[client]) // BATCH)
        slow = TIME.slowness(len(SIZES), SEED)[client]
        size = 4 * sum(v.size for v in self.x.values())
        return 8 * 2 * size / 25e6 + 2 * 0.4 + steps * slow

    def run(self, aggregations):
        while len(self.rows) < aggregations:
            while len(self.at_work) < self.concurrency:
                busy = {c for _, c, *_ in self.at_work} | self.waiting
                client = self.draw([c for c in range(len(SIZES)) if c not in busy])
                if client is None:
                    break
                result = self.train(client)
                finish = self.now + self.seconds(client)
                self.at_work.append((finish, client, result, dict(self.x), self.version))
            self.at_work.sort(key=lambda one: one[0])
            self.now, client, (w, v), fetched, version = self.at_work.pop(0)
            self.personal[client] = v
            self.waiting.add(client)
            self.buffer.append((w, fetched, self.version - version, client))
            new = self.server(self.x, self.buffer)
            if new is not None:
                self.rows.append((self.now, sorted(self.waiting), [one[2] for one in self.buffer]))
                self.x, self.version = new, self.version + 1
                self.buffer, self.waiting = [], set()
        return self


def fedbuff_server(size, rate=1.0):
    def server(x, buffer):
        if len(buffer) < size:
            return None
        total = {n: np.zeros_like(v) for n, v in x.items()}
        for w, fetched, tau, _ in buffer:
            for n in total:
                total[n] += (w[n] - fetched[n]) / math.sqrt(1 + tau)
        return {n: x[n] + rate * total[n] / size for n in x}

    return server


def fedasync_server(alpha):
    def server(x, buffer):
        ((w, _, tau, _),) = buffer
        a = alpha * (1.0 if tau <= 1 else 1 / (2.0 * (tau - 1) + 1))  # hinge: slope 2, grace 1
        return {n: (1 - a) * x[n] + a * w[n] for n in x}

    return server


def simulated(asynchronous, algorithm, rounds, **options):
    return fp.simulate(
        model(),
        algorithm,
        toy.clients(SIZES),
        rounds=rounds,
        batch_size=BATCH,
        seed=SEED,
        asynchronous=asynchronous,
        **run_options(eval_every=rounds, time_model=TIME, progress=False, **options),
    )


def started(run, rounds, asynchronous):
    """Returns a function that draws the clients that the queue of the run drew."""
    session = fp.session(
        model(),
        FEDAVG,
        toy.clients(SIZES),
        batch_size=BATCH,
        asynchronous=asynchronous,
        system=fp.System(time=TIME),
    )
    schedule = session.schedule(SEED)
    jobs = [j for r in range(1, rounds + 2) for j in schedule.aggregation(r).started]
    order = iter([job.client for job in sorted(jobs, key=lambda job: job.number)])

    def draw(idle):
        if not idle:
            return None
        client = next(order)
        assert client in idle
        return client

    return draw


SERVERS = {
    "fedbuff": (fp.asynchronous.fedbuff(3, concurrency=4), fedbuff_server(3), 4),
    "all at work": (
        fp.asynchronous.fedbuff(2, server_learning_rate=0.7),
        fedbuff_server(2, 0.7),
        6,
    ),
    "fedasync": (
        fp.asynchronous.fedasync(0.6, concurrency=3, staleness="hinge", slope=2.0, grace=1),
        fedasync_server(0.6),
        3,
    ),
}


@pytest.mark.parametrize(
    ("name", "ditto", "engine"),
    [
        *((name, False, "compiled") for name in SERVERS),
        ("fedbuff", True, "compiled"),
        ("fedasync", True, "compiled"),
        ("fedbuff", True, "reference"),
    ],
)
@pytest.mark.sample(
    "fedbuff-False-compiled", "all at work*", "fedasync-True-*", "fedbuff-True-reference"
)
def test_runs_equal_a_reference_of_single_events(name, ditto, engine):
    asynchronous, server, concurrency = SERVERS[name]
    rounds = 9 if engine == "compiled" else 4
    algorithm = DITTO if ditto else FEDAVG
    lanes = 1 if engine == "reference" else 2
    run = simulated(asynchronous, algorithm, rounds, lanes=lanes, engine=engine)
    draw = started(run, rounds, asynchronous)
    expected = Reference(server, toy.clients(SIZES), concurrency, draw, ditto=ditto).run(rounds)

    clock = np.cumsum([row["simulated_seconds"] for row in run.metrics[1:]])
    assert np.allclose(clock, [time for time, _, _ in expected.rows], rtol=1e-12)
    assert [row["clients"] for row in run.metrics[1:]] == [who for _, who, _ in expected.rows]
    staleness = [row["staleness_mean"] for row in run.metrics[1:]]
    assert np.allclose(staleness, [np.mean(taus) for _, _, taus in expected.rows])
    assert max(staleness) > 0.3, "the settings test stale uploads"
    for leaf, value in run.params.items():
        assert_close(value, expected.x[leaf], atol=1e-5)
    if ditto:
        for client in range(len(SIZES)):
            own = run.client_params(client)
            for leaf, value in own.items():
                assert_close(value, expected.personal[client][leaf], atol=1e-5)


def test_lanes_and_packing_do_not_change_results():
    asynchronous = fp.asynchronous.fedbuff(3, concurrency=5)
    runs = [simulated(asynchronous, FEDAVG, 6, lanes=lanes) for lanes in (1, 3)]
    for leaf, value in runs[0].params.items():
        assert_close(value, runs[1].params[leaf], atol=1e-6)


def test_all_clients_at_equal_speed_are_synchronous_fedavg():
    common = {
        "rounds": 4,
        "batch_size": 4,
        "seed": 5,
        "progress": False,
        "time_model": fp.TimeModel(seconds_per_step=0.0),
    }
    bound, clients = toy.model(), toy.clients(SIZES)  # with dropout
    asynchronous = fp.asynchronous.fedbuff(len(SIZES), staleness="constant", weights="size")
    fedbuff = fp.simulate(
        bound, FEDAVG, clients, asynchronous=asynchronous, **run_options(**common)
    )
    fedavg = fp.simulate(bound, FEDAVG, clients, **run_options(**common))
    for leaf, value in fedbuff.params.items():
        assert_close(value, fedavg.params[leaf], atol=1e-6)
    for one, other in zip(fedbuff.metrics, fedavg.metrics, strict=True):
        assert one.get("clients") == other.get("clients")
        assert one["simulated_seconds"] == approx(other["simulated_seconds"])
        # Bytes of the next jobs belong to the next interval.
        assert one["bytes_up"] == other["bytes_up"]
        assert one["bytes_down"] == other["bytes_down"]
