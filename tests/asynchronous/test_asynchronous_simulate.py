"""Asynchronous runs: a slow reference from the papers' algorithm boxes, rows, and refusals."""

import functools
import math

import jax
import linear
import numpy as np
import optax
import pytest
import running
import toy
from closeness import approx, assert_close
from internals import batches, host_rng
from refusals import refused

import fedjax_peft as fp

pytestmark = pytest.mark.slow

SIZES = [5, 9, 12, 7, 20, 3]
CLIENTS = toy.clients(SIZES)
TIME = fp.TimeModel(seconds_per_step=1.0, spread=1.0)
RATE, LAM, BATCH, SEED = 0.3, 0.5, 4, 3
SGD = optax.sgd(RATE)
FEDAVG = fp.algorithms.fedavg(SGD)
DITTO = fp.algorithms.ditto(SGD, lam=LAM)
model = functools.cache(linear.model)
FEDBUFF = fp.asynchronous.fedbuff(2, concurrency=4)
STATEFUL = fp.transforms.clip_norm(1.0)._replace(init=lambda template: np.zeros(()))


def simulated(asynchronous=FEDBUFF, algorithm=FEDAVG, rounds=5, **options):
    given = {"model": model(), "clients": CLIENTS, "batch_size": BATCH, "seed": SEED}
    given |= {"rounds": rounds, "eval_every": rounds, "time_model": TIME, **options}
    return running.run(algorithm, asynchronous=asynchronous, **given)


def same(one, other, **tolerance):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert_close(a, b, **tolerance)


def test_a_session_grows_its_history_beyond_the_foreseen_rounds():
    made = [
        fp.session(
            model(),
            FEDAVG,
            CLIENTS,
            batch_size=4,
            asynchronous=FEDBUFF,
            system=fp.System(time=TIME),
            rounds=rounds,
        )
        for rounds in (1, 12)
    ]
    ends = []
    for session in made:
        state = session.init(1)
        places = len(jax.tree.leaves(state.history)[0])
        for _ in range(12):
            state, _ = session.step(state)
        ends.append((places, state.server))
    assert ends[0][0] < ends[1][0]
    same(ends[0][1], ends[1][1], atol=1e-6)


def test_clients_left_out_leave_the_versions_of_others():
    session = fp.session(
        *(model(), FEDAVG, CLIENTS),
        **{"batch_size": 4, "asynchronous": FEDBUFF, "system": fp.System(time=TIME), "rounds": 9},
    )
    for number in range(1, 9):
        whole = session.plan(number)
        for gone in whole.client.tolist():
            part, versions = session.plan(number, without=[gone]), []
            for plan in (whole, part):
                fetched = zip(*(x.tolist() for x in plan.fetched[1:]), strict=True)
                versions.append(dict(zip(plan.client.tolist(), fetched, strict=True)))
            del versions[0][gone]
            assert versions[0].items() <= versions[1].items()


def test_a_period_has_room_for_all_arrivals_where_clients_come_and_go():
    # A client whose upload waits leaves its place to another one, whose upload may come in time.
    session = fp.session(
        model(),
        FEDAVG,
        CLIENTS,
        batch_size=4,
        asynchronous=fp.asynchronous.semi_synchronous(60.0, concurrency=2),
        system=fp.System(time=TIME, availability=fp.availability.diurnal(1000.0, 0.9)),
        rounds=4,
    )
    plans = [session.plan(number) for number in range(1, 5)]
    assert max(np.count_nonzero(plan.client >= 0) for plan in plans) > 2


def test_first_downloads_are_the_same_after_a_resume(tmp_path):
    """With an SVD start, who comes after version 0 also fetches the factors that make the base."""
    model = toy.lora_model(method=fp.lora(rank=1, init="svd"))
    given = {"model": model, "asynchronous": fp.asynchronous.fedbuff(1, concurrency=2)}
    whole = simulated(rounds=6, **given)
    simulated(rounds=1, out=tmp_path / "run", **given)
    parts = simulated(rounds=6, out=tmp_path / "run", resume=True, **given)
    told = ["bytes_down", "bytes_up", "simulated_seconds", "clients"]
    found = [[[row[n] for n in told] for row in run.metrics[1:]] for run in (whole, parts)]
    assert found[0] == found[1]
    sizes = {row[0] for row in found[0]}
    assert len(sizes) > 1, "somebody comes late"


def test_rows_tell_costs_and_staleness():
    rows = simulated(rounds=6, failure_rate=0.4).metrics[1:]
    size = 4 * sum(x.size for x in model().trainable.values())
    assert all(row["bytes_up"] == 2 * size for row in rows)
    assert any(row["failed"] for row in rows)


def test_a_row_has_the_numbers_of_its_aggregation():
    asynchronous = fp.asynchronous.fedbuff(2, concurrency=4, max_staleness=1)
    run = simulated(asynchronous, rounds=8)
    session = fp.session(
        *(model(), FEDAVG, CLIENTS),
        **{"batch_size": BATCH, "asynchronous": asynchronous, "system": fp.System(time=TIME)},
    )
    for row in run.metrics[1:]:
        made = session.schedule(SEED).aggregation(row["round"])
        assert (row["in_flight"], row["versions"]) == (made.in_flight, made.versions)
        assert row["discarded"] == sorted(job.client for job in made.discarded)
    assert any(row["discarded"] for row in run.metrics[1:])
    assert len({row["versions"] for row in run.metrics[1:]}) > 1


def test_slow_clients_fail_more_often():
    from fedjax_peft.simulation.asynchrony import failure_probability

    assert failure_probability(0.2, 1.0, 1.0) == approx(0.2)
    assert failure_probability(0.2, 1.0, 4.0) == approx(0.5)  # odds 1/4 -> 1
    assert failure_probability(0.2, 0.0, 4.0) == approx(0.2)
    assert failure_probability(0.0, 2.0, 9.0) == 0.0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"algorithm": fp.algorithms.scaffold(SGD, learning_rate=0.2)}, "control variates"),
        ({"algorithm": fp.algorithms.feddyn(SGD, alpha=0.1)}, "FedDyn"),
        ({"algorithm": fp.algorithms.flora(SGD)}, "flora"),
        ({"algorithm": fp.algorithms.fedavg(SGD, aggregator=fp.aggregators.fra())}, "anew"),
        ({"deadline": 5.0}, "deadline does not fit"),
        ({"sampling": "round_robin", "clients_per_round": 4}, "sampling does not fit"),
        ({"time_model": fp.TimeModel("measured")}, "not 'measured'"),
        ({"time_model": TIME._replace(topology="serial")}, "parallel"),
        ({"asynchronous": fp.asynchronous.fedbuff(7)}, "more than the 6 clients"),
        ({"clients_per_round": 3}, "two numbers for the same thing"),
        ({"asynchronous": "fedbuff"}, "is not an fp.contracts.Asynchronous"),
        ({"failure_exponent": -1.0}, "failure_exponent"),
        ({"transforms": STATEFUL}, "state on the server"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_refused(options, match):
    refused(match, simulated, model=toy.lora_model(), **options)


def test_privacy_is_refused():
    privacy = fp.privacy.central(clip=1.0, noise_multiplier=1.0)
    refused("privacy does not fit", simulated, privacy=privacy)


# ------------------------------------------------------------------------- against a slow reference


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


def started(run, rounds, asynchronous):
    """Returns a function that draws the clients that the queue of the run drew."""
    session = fp.session(
        model(),
        FEDAVG,
        CLIENTS,
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
    ("name", "ditto"),
    [*((name, False) for name in SERVERS), ("fedbuff", True), ("fedasync", True)],
)
@pytest.mark.sample("fedbuff-False", "all at work*", "fedasync-True")
def test_runs_equal_a_reference_of_single_events(name, ditto):
    (asynchronous, server, concurrency), rounds = SERVERS[name], 9
    run = simulated(asynchronous, DITTO if ditto else FEDAVG, rounds, lanes=2)
    draw = started(run, rounds, asynchronous)
    expected = Reference(server, CLIENTS, concurrency, draw, ditto=ditto).run(rounds)

    clock = np.cumsum([row["simulated_seconds"] for row in run.metrics[1:]])
    assert_close(clock, [time for time, _, _ in expected.rows], rtol=1e-12)
    assert [row["clients"] for row in run.metrics[1:]] == [who for _, who, _ in expected.rows]
    staleness = [row["staleness_mean"] for row in run.metrics[1:]]
    assert_close(staleness, [np.mean(taus) for _, _, taus in expected.rows], rtol=1e-5)
    oldest = [row["staleness_max"] for row in run.metrics[1:]]
    assert oldest == [max(taus) for _, _, taus in expected.rows]
    assert max(staleness) > 0.3, "the settings test stale uploads"
    for leaf, value in run.params.items():
        assert_close(value, expected.x[leaf], atol=1e-5)
    if ditto:
        for client in range(len(SIZES)):
            own = run.client_params(client)
            for leaf, value in own.items():
                assert_close(value, expected.personal[client][leaf], atol=1e-5)


def test_all_clients_at_equal_speed_are_synchronous_fedavg():
    common = {"rounds": 4, "seed": 5, "time_model": fp.TimeModel(seconds_per_step=0.0)}
    common |= {"model": toy.model(), "clients": CLIENTS}  # with dropout
    asynchronous = fp.asynchronous.fedbuff(len(SIZES), staleness="constant", weights="size")
    fedbuff = running.run(FEDAVG, asynchronous=asynchronous, **common)
    fedavg = running.run(FEDAVG, **common)
    for leaf, value in fedbuff.params.items():
        assert_close(value, fedavg.params[leaf], atol=1e-6)
    for one, other in zip(fedbuff.metrics, fedavg.metrics, strict=True):
        assert one.get("clients") == other.get("clients")
        assert one["simulated_seconds"] == approx(other["simulated_seconds"])
        # Bytes of the next jobs belong to the next interval.
        assert one["bytes_up"] == other["bytes_up"]
        assert one["bytes_down"] == other["bytes_down"]
