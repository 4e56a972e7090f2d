"""FedProx, SCAFFOLD, FedDyn, FedNova and FedOpt equal slow references and sums by hand."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import running
import toy
from closeness import approx, assert_close
from internals import Cohort, Program, Setup, Task, fedopt, host_rng, make_plan

import fedjax_peft as fp
from fedjax_peft import aggregators

pytestmark = pytest.mark.slow

# ---------------------------------------------------------------------- against slow references

SIZES, RATE = (7, 4, 12, 3), 0.3
FEDERATION = toy.clients(SIZES)  # batches of 4: the clients make 2, 1, 3 and 1 local steps
HEADS = {"shared": (toy.SHARED, ()), "private": (toy.ADAPTER, toy.HEAD)}
MODEL, MOST_STEPS = toy.model(dropout=0), 6


def drawn_steps(client, number):
    """Returns the local steps that a client draws from 1 to ``MOST_STEPS``."""
    return int(host_rng(0, "work", number, client).integers(1, MOST_STEPS + 1))


class Slow(reference.Slow):
    """The common part of the references."""

    model, federation = MODEL, FEDERATION

    def __init__(self, optimizer, head, drawn, **options):
        shared, private = HEADS[head]
        super().__init__(
            optimizer=optimizer, shared=shared, private=private, drawn=drawn, **options
        )
        self.zero = {n: np.zeros_like(self.leaves[n]) for n in shared}
        self.correction, self.corrections = self.zero, [self.zero for _ in SIZES]

    def batches(self, client, number):
        """Yields the batches of one epoch, or of as many steps as the client has drawn."""
        if not self.drawn:
            return super().batches(client, number)
        options = {**self.local, "epochs": MOST_STEPS}
        batches = reference.local_batches(FEDERATION, client, number, **options)
        return itertools.islice(batches, drawn_steps(client, number))

    def pull(self, leaves, n, client):
        """Returns what is added to the gradient of a shared leaf."""
        return 0.0

    def gradient(self, leaves, batch, client, number):
        by = super().gradient(leaves, batch, client, number)
        return by | {n: by[n] + self.pull(leaves, n, client) for n in self.shared}


class SlowFedProx(Slow):
    def pull(self, leaves, n, client):
        return self.mu * (leaves[n] - self.leaves[n])


class SlowScaffold(Slow):
    size_weights, server_learning_rate = False, 1.0

    def pull(self, leaves, n, client):
        return self.correction[n] - self.corrections[client][n]

    def aggregate(self, uploads, weights, number):
        c, received, changes = self.correction, dict(self.leaves), []
        for k, upload in zip(self.members, uploads, strict=True):
            divisor = self.steps[k] * self.learning_rate
            changes.append({n: (received[n] - upload[n]) / divisor - c[n] for n in c})
            self.corrections[k] = {n: self.corrections[k][n] + x for n, x in changes[-1].items()}
        for n, x in reference.average(uploads).items():
            self.leaves[n] = received[n] + self.server_learning_rate * (x - received[n])
        self.correction = {n: c[n] + sum(d[n] for d in changes) / len(SIZES) for n in c}


class SlowFedDyn(Slow):
    """``correction`` is -h / alpha, by which the server moves the average."""

    size_weights = False

    def pull(self, leaves, n, client):
        return self.alpha * (leaves[n] - self.leaves[n]) - self.corrections[client][n]

    def aggregate(self, uploads, weights, number):
        received = dict(self.leaves)
        for k, upload in zip(self.members, uploads, strict=True):
            g = self.corrections[k]
            self.corrections[k] = {n: g[n] - self.alpha * (upload[n] - received[n]) for n in g}
        for n in self.shared:
            moves = sum(u[n] - received[n] for u in uploads)
            self.correction = {**self.correction, n: self.correction[n] + moves / len(SIZES)}
            mean = np.mean([u[n] for u in uploads], axis=0)
            self.leaves[n] = mean + self.correction[n]


class SlowFedNova(Slow):
    def aggregate(self, uploads, weights, number):
        received, directions, lengths = dict(self.leaves), [], []
        for k, upload in zip(self.members, uploads, strict=True):
            # The weight of the gradient of step i in the last model: 1 + ρ + ... + ρ^(steps-1-i).
            steps = self.steps[k]
            a = [sum(self.momentum**j for j in range(steps - i)) for i in range(steps)]
            lengths.append(sum(a))
            directions.append({n: (upload[n] - received[n]) / sum(a) for n in self.shared})
        effective = np.average(lengths, weights=weights)
        for n, x in reference.average(directions, weights).items():
            self.leaves[n] = received[n] + effective * x


class SlowFedOpt(Slow):
    """``serve(m, v, change)`` returns the server's (m, v, step)."""

    def aggregate(self, uploads, weights, number):
        state = vars(self).setdefault("state", dict.fromkeys(self.shared, (0.0, 0.0)))
        for n in self.shared:
            change = np.average([u[n] for u in uploads], axis=0, weights=weights) - self.leaves[n]
            *state[n], step = self.serve(*state[n], change)
            self.leaves[n] = self.leaves[n] + step


def avgm(m, v, change):
    m = 0.7 * m + change
    return m, v, 0.6 * m


def adaptive(second, b1=0.8):
    def serve(m, v, change):
        m, v = b1 * m + (1 - b1) * change, second(v, change)
        return m, v, 0.05 * m / (np.sqrt(v) + 0.02)

    return serve


OPTIMIZERS = {
    "sgd": (optax.sgd(RATE), functools.partial(reference.Sgd, RATE)),
    "momentum": (optax.sgd(RATE, momentum=0.6), functools.partial(reference.Sgd, RATE, 0.6)),
    "adam": (optax.adam(0.02), functools.partial(reference.Adam, 0.02)),
}
SERVER = {"server_learning_rate": 0.05, "b1": 0.8, "tau": 0.02}


def unwarned(optimizer, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fp.algorithms.scaffold(optimizer, **options)


def case(optimizer, fast, slow, options, slow_options=None):
    """Returns (algorithm without its head, reference without its head and work)."""
    ours, theirs = OPTIMIZERS[optimizer]
    slow_options = options if slow_options is None else slow_options
    return functools.partial(fast, ours, **options), functools.partial(slow, theirs, **slow_options)


def opt_case(optimizer, fast, options, serve):
    return case(optimizer, fast, SlowFedOpt, options, {"serve": serve})


SCAFFOLD = {"learning_rate": RATE, "server_learning_rate": 0.8}
AVGM = {"momentum": 0.7, "server_learning_rate": 0.6}
OF_ADAM = adaptive(lambda v, d: 0.9 * v + 0.1 * d**2)
OF_YOGI = adaptive(lambda v, d: v - 0.1 * d**2 * np.sign(v - d**2))
CASES = {
    "fedprox sgd": case("sgd", fp.algorithms.fedprox, SlowFedProx, {"mu": 0.9}),
    "fedprox adam": case("adam", fp.algorithms.fedprox, SlowFedProx, {"mu": 0.9}),
    "scaffold sgd": case("sgd", fp.algorithms.scaffold, SlowScaffold, SCAFFOLD),
    "scaffold adam": case("adam", unwarned, SlowScaffold, {"learning_rate": RATE}),
    "feddyn sgd": case("sgd", fp.algorithms.feddyn, SlowFedDyn, {"alpha": 0.4}),
    "feddyn adam": case("adam", fp.algorithms.feddyn, SlowFedDyn, {"alpha": 0.4}),
    "fednova sgd": case("sgd", fp.algorithms.fednova, SlowFedNova, {}, {"momentum": 0.0}),
    "fednova momentum": case("momentum", fp.algorithms.fednova, SlowFedNova, {}, {"momentum": 0.6}),
    "fedavgm": opt_case("sgd", fp.algorithms.fedavgm, AVGM, avgm),
    "fedadam": opt_case("sgd", fp.algorithms.fedadam, {"b2": 0.9, **SERVER}, OF_ADAM),
    "fedyogi": opt_case("adam", fp.algorithms.fedyogi, {"b2": 0.9, **SERVER}, OF_YOGI),
    "fedadagrad": opt_case(
        "sgd", fp.algorithms.fedadagrad, SERVER, adaptive(lambda v, d: v + d**2)
    ),
}
DRAWN = ("fedprox adam", "scaffold adam", "feddyn adam", "fednova momentum")
"""Each client makes the partial work that it has drawn; what divides by K uses its own K."""
SETTINGS = [(name, 3, 3, "private", 0) for name in CASES]
SETTINGS += [(f"{name} sgd", 4, 1, "shared", 4) for name in ("scaffold", "feddyn", "fednova")]


@pytest.mark.parametrize(("name", "per_round", "lanes", "head", "empty"), SETTINGS)
@pytest.mark.sample(*(f"{name}-*" for name in DRAWN), "fedadam-*", "* sgd-4-1-shared-4")
def test_rounds_equal_the_slow_reference(name, per_round, lanes, head, empty):
    """Clients without examples never take part, so ``empty`` such clients have no effect."""
    nobody, drawn = (np.zeros(0, np.int32),) * empty, name in DRAWN
    federation = fp.Clients(FEDERATION.data, FEDERATION.indices + nobody)
    options = {"lanes": lanes, "bound": MODEL, "local_steps": (1, MOST_STEPS) if drawn else None}
    make = CASES[name][0]
    rig = toy.Engine(make(head=head), federation, per_round=per_round + empty, **options)
    if drawn:
        steps = [rig.schedule.cohort(number) for number in (1, 2)]
        assert [len(x) for x in steps[0].batches] == [drawn_steps(c, 1) for c in steps[0].client]
        assert len({len(x) for one in steps for x in one.batches}) > 2, "the work is unequal"
    result, slow = rig.rounds()[-1], CASES[name][1](head=head, drawn=drawn)
    slow.run(reference.cohorts(FEDERATION, per_round))
    shared, own = HEADS[head]
    model = rig.algorithm.server.model(result.server)
    private = fp.tree.take(result.client_state, np.arange(len(SIZES)))
    kept = private.get("model", private)
    assert set(model) == set(shared)
    assert set(kept) == set(own)
    for n in shared:
        assert_close(model[n], slow.leaves[n], rtol=0, atol=1e-5)
        assert np.abs(slow.leaves[n] - rig.shared[n]).max() > 1e-3, "every leaf has moved"
    for n in own:
        assert_close(kept[n], [leaves[n] for leaves in slow.own], rtol=0, atol=1e-5)
    if name.startswith(("scaffold", "feddyn")):
        server = result.server["control"] if "control" in private else result.server.moved
        each = private["control" if "control" in private else "gradient"]
        for n in shared:
            assert_close(server[n], slow.correction[n], rtol=0, atol=1e-5)
            assert_close(each[n], [c[n] for c in slow.corrections], rtol=0, atol=1e-5)


# ------------------------------------------------------------------------- against hand calculation


@functools.cache
def quadratic():
    """Returns the model ½ (x - b)² and its task, for which algorithms compile once."""

    def apply(frozen, trainable, batch, key, train):
        distance = trainable["x"][None] - batch["b"]
        return fp.contracts.Outputs(distance, distance)

    def loss(outputs, batch):
        losses = jnp.where(batch["mask"], outputs.logits**2 / 2, 0.0)
        return jnp.sum(losses), jnp.sum(batch["mask"], dtype=jnp.float32)

    return apply, Task(loss, lambda outputs, batch: {"loss": loss(outputs, batch)})


class Quadratics:
    """Four clients with the losses ½ (x - b)² and SGD of step ½, which halves the distance to b.

    Client 0 has b = 1 and makes one step, client 1 has b = 4 and makes two (its weight by size is
    2); the others are never there. x starts at 0.
    """

    def __init__(self, algorithm):
        setup = Setup(algorithm, *quadratic(), {}, {}, 4)
        self.program = Program(setup, {"b": np.array([1, 4, 4], np.float32)})
        self.algorithm, shared = algorithm, {"x": jnp.zeros(())}
        client_state = fp.tree.broadcast(algorithm.init_client_state(shared, {}), 4)
        self.state = fp.State(jax.tree.map(jnp.copy, algorithm.server.init(shared)), client_state)
        self.round_index = 0
        self.everybody = [(0, 1.0, [[0]]), (1, 2.0, [[1], [2]])]

    def round(self, members=None):
        """Returns the server's x after another round."""
        chosen = self.everybody if members is None else members
        clients, weights, work = zip(*chosen, strict=True) if chosen else ((), (), ())
        cohort = Cohort(clients, weights, [np.array(rows, np.int32) for rows in work])
        self.round_index += 1
        plan = make_plan(cohort, 2, time_steps=2, slots=2, batch_size=1)
        result = self.program(self.state, plan, self.round_index)
        self.state = fp.State(*result.state[:2])
        return float(self.algorithm.server.model(self.state.server)["x"])


HALF = optax.sgd(0.5)
YOGI = {"tau": 0.20156318, "start": 4.0, "weights": "uniform"}
MAKE = {
    # Round 1: both start at 0. Client 0: 0.5. Client 1: 2, 3. In a second round from x without
    # corrections, client 0 ends at x/2 + 1/2 and client 1 at x/4 + 3.
    #
    # The first step of each is as ever, the penalty being 0. Client 0: 0.5. Client 1: 2, where the
    # gradient is -2 + 0.5 · 2 = -1: 2.5. By size: (0.5 + 2 · 2.5) / 3.
    "fedprox": (lambda: fp.algorithms.fedprox(HALF, mu=0.5), [5.5 / 3]),
    # Round 1, all control variates 0. c_0 = (0 - 0.5) / 0.5 = -1, c_1 = (0 - 3) / (2 · 0.5) = -3;
    # x = (0.5 + 3) / 2 = 1.75, c = (-1 - 3) / 4 = -1: of four clients.
    # Round 2. Client 0: 0.75 - 1 + 1 = 0.75, to 1.375. Client 1: -2.25 - 1 + 3 = -0.25, to 1.875;
    # -2.125 - 1 + 3 = -0.125, to 1.9375. x = (1.375 + 1.9375) / 2. Then c_0 = 0.75 and
    # c_1 = -2.1875, which are the means of their plain gradients;
    # c = -1 + (1.75 + 0.8125) / 4 = -0.359375.
    # Round 3 from 1.65625. Client 0: 0.65625 - 0.359375 - 0.75 = -0.453125, to 1.8828125.
    # Client 1: -2.34375 - 0.359375 + 2.1875 = -0.515625, to 1.9140625; -2.0859375 + 1.828125 =
    # -0.2578125, to 2.04296875. x = 1.962890625.
    "scaffold": (
        lambda: fp.algorithms.scaffold(HALF, learning_rate=0.5),
        [1.75, 1.65625, 1.962890625],
    ),
    # By size, 1 to 2. Round 1: x = (0.5 + 2 · 3) / 3, and c = 2/4 · (-1 - 2 · 3) / 3 = -7/6.
    # Round 2 from 13/6. Client 0: 7/6 - 7/6 + 1 = 1, to 5/3. Client 1: -11/6 - 7/6 + 3 = 0, twice.
    # x = (5/3 + 2 · 13/6) / 3 = 2; c_0 = 7/6, c_1 = -11/6, and
    # c = -7/6 + 2/4 · (13/6 + 2 · 7/6) / 3 = -5/12.
    # Round 3. Client 0: 1 - 5/12 - 7/6 = -7/12, to 55/24. Client 1: -2 - 5/12 + 11/6 = -7/12, to
    # 55/24; -41/24 + 17/12 = -7/24, to 39/16.
    "scaffold by size": (
        lambda: fp.algorithms.scaffold(HALF, learning_rate=0.5, weights="size"),
        [6.5 / 3, 2.0, (55 / 24 + 2 * 39 / 16) / 3],
    ),
    # α = 0.5. Round 1, all 0. Client 0: 0.5, g_0 = -0.25. Client 1: 2; -2 + 0.5 · 2 = -1, to 2.5;
    # g_1 = -1.25. h = -0.5 / 4 · (0.5 + 2.5) = -0.375; x = 1.5 + 0.375 / 0.5 = 2.25.
    # Round 2. Client 0: 1.25 + 0.25 = 1.5, to 1.5; g_0 = -0.25 + 0.375 = 0.125. Client 1:
    # -1.75 + 1.25 = -0.5, to 2.5; -1.5 + 1.25 + 0.125 = -0.125, to 2.5625.
    # h = -0.375 - 0.125 · (-0.75 + 0.3125) = -0.3203125; x = 2.03125 + 0.640625.
    "feddyn": (lambda: fp.algorithms.feddyn(HALF, alpha=0.5), [2.25, 2.671875]),
    # d_0 = 0.5 / 1, d_1 = 3 / 2, p = 1/3, 2/3: effectively 1/3 + 4/3 = 5/3 steps of
    # 0.5/3 + 2 · 1.5/3 = 7/6. (FedAvg: 13/6.)
    "fednova": (lambda: fp.algorithms.fednova(HALF), [35 / 18]),
    # Momentum 0.5. Client 1: gradient -4, to 2; buffer -2 - 2 = -4, to 4. Its a are 1.5 and 1:
    # d_1 = 4 / 2.5 = 1.6. (1 + 2 · 2.5) / 3 = 2 steps of (0.5 + 2 · 1.6) / 3.
    "fednova with momentum": (
        lambda: fp.algorithms.fednova(optax.sgd(0.5, momentum=0.5)),
        [2 * 3.7 / 3],
    ),
    # Below, weights are uniform: Δ = (0.5 + 3) / 2 = 1.75 in round 1.
    # m = 1.75, x = 1.75. Round 2: clients at 1.375 and 3.4375, Δ = 0.65625;
    # m = 0.875 + 0.65625 = 1.53125.
    "fedavgm": (
        lambda: fp.algorithms.fedavgm(HALF, momentum=0.5, weights="uniform"),
        [1.75, 3.28125],
    ),
    # The step is 0.5 m + Δ = 2.625. Round 2: clients at 1.8125 and 3.65625, Δ = 0.109375;
    # m = 0.875 + 0.109375; x = 2.625 + 0.4921875 + 0.109375.
    "fedavgm, Nesterov": (
        lambda: fp.algorithms.fedavgm(HALF, momentum=0.5, nesterov=True, weights="uniform"),
        [2.625, 3.2265625],
    ),
    # m = 0.1 · 1.75 = 0.175, √v = √0.01 · 1.75 = 0.175, τ = 0.175: half a step of 0.1. Round 2:
    # clients at 0.525 and 3.0125, Δ = 1.76875 - 0.05 = 1.71875; m = 0.1575 + 0.171875 = 0.329375,
    # v = 0.99 · 0.030625 + 0.01 · 2.9541015625 = 0.059859765625, √v = 0.24466255;
    # x = 0.05 + 0.1 · 0.329375 / 0.41966255.
    "fedadam": (
        lambda: fp.algorithms.fedadam(HALF, server_learning_rate=0.1, tau=0.175, weights="uniform"),
        [0.05, 0.12848571],
    ),
    # v from 4, above Δ² = 3.0625: 4 - 0.25 · 3.0625 = 3.234375 (Adam: 3.765625), √v = 1.79843682;
    # x = 0.1 · 0.175 / (1.79843682 + 0.20156318) = 0.00875. Round 2: clients at 0.504375 and
    # 3.0021875, Δ = 1.74453125, Δ² = 3.04338928 below v: v = 3.234375 - 0.76084732 = 2.47352768,
    # √v = 1.57274527; m = 0.1575 + 0.174453125; x = 0.00875 + 0.0331953125 / 1.77430845.
    # Round 3, Δ² about 3 above v = 2.47: it grows again.
    "fedyogi": (
        lambda: fp.algorithms.fedyogi(HALF, server_learning_rate=0.1, b2=0.75, **YOGI),
        [0.00875, 0.02745888],
    ),
    # v = 3.0625, x = 0.1 · 1.75 / (1.75 + 0.25) = 0.0875. Round 2: clients at 0.54375 and
    # 3.021875, Δ = 1.6953125, v = 3.0625 + 2.87408447, √v = 2.43651077;
    # x = 0.0875 + 0.16953125 / 2.68651077.
    "fedadagrad": (
        lambda: fp.algorithms.fedadagrad(
            HALF, server_learning_rate=0.1, tau=0.25, weights="uniform"
        ),
        [0.0875, 0.15060471],
    ),
}


@pytest.mark.parametrize("name", MAKE)
def test_hand_calculated_rounds(name):
    make, expected = MAKE[name]
    rig = Quadratics(make())
    # Some ten operations a round, carried on by the momenta of three.
    assert [rig.round() for _ in expected] == approx(expected, rel=5e-6)
    # Nobody is there, as where all uploads are dropped: then nothing moves, momentum neither.
    before = jax.device_get(rig.state)
    rig.round([])
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(rig.state)))


def test_fedyogi_keeps_the_second_moment_between_its_neighbours():
    rig = Quadratics(fp.algorithms.fedyogi(HALF, b2=0.75, tau=1.0, weights="uniform"))
    rig.round()
    # From 0 v grows by (1 - β₂) Δ², as Adam's does.
    assert float(rig.state[0].optimizer.second["x"]) == approx(0.25 * 1.75**2)


@pytest.mark.parametrize(
    "same",
    [
        lambda: fp.algorithms.fedavg(HALF),
        lambda: fp.algorithms.fedprox(HALF, mu=0.0),
        lambda: fedopt(HALF, server=optax.sgd(1.0)),
        lambda: fp.algorithms.fedavgm(HALF, momentum=0.0),
        lambda: fp.algorithms.scaffold(HALF, learning_rate=0.5, weights="size"),
    ],
    ids=["fedavg", "fedprox", "fedopt", "fedavgm", "scaffold's first round"],
)
def test_special_cases_are_fedavg(same):
    assert Quadratics(same()).round() == approx(13 / 6, rel=1e-6)


def test_fednova_is_fedavg_for_equal_work_with_any_momentum():
    heavy = optax.sgd(0.5, momentum=0.3)
    one, other = Quadratics(fp.algorithms.fednova(heavy)), Quadratics(fp.algorithms.fedavg(heavy))
    equal = [(0, 1.0, [[0], [0]]), (1, 2.0, [[1], [2]])]
    assert one.round(equal) == approx(other.round(equal), rel=1e-6)


def test_optimum_of_unequal_clients():
    """The common optimum is 2.5. FedAvg ends elsewhere; these algorithms reach it."""
    ends = {}
    for name, make in {
        "scaffold": lambda: fp.algorithms.scaffold(HALF, learning_rate=0.5),
        "feddyn": lambda: fp.algorithms.feddyn(HALF, alpha=0.5),
        "fednova": lambda: fp.algorithms.fednova(HALF, weights="uniform"),
        "fedavg": lambda: fp.algorithms.fedavg(HALF)._replace(weights="uniform"),
    }.items():
        rig = Quadratics(make())
        ends[name] = [rig.round() for _ in range(60)][-1]
    assert ends["scaffold"] == approx(2.5, abs=1e-3)
    assert ends["feddyn"] == approx(2.5, abs=1e-3)
    assert abs(ends["fednova"] - 2.5) < abs(ends["fedavg"] - 2.5)


# ------------------------------------------------------------------------------------ what is odd


def injected(**options):
    return optax.inject_hyperparams(optax.sgd)(**options)


def named(optimizer):
    """Returns an optimizer that knows the trained leaves by their names."""
    return optax.multi_transform({"all": optimizer}, dict.fromkeys(toy.SHARED, "all"))


PLAIN = {
    "sgd": optax.sgd(0.1),
    "momentum 0": optax.sgd(0.1, momentum=0.0),
    "injected": injected(learning_rate=0.1, momentum=0.0),
    "named": named(optax.sgd(0.1)),
    "constant schedule": optax.sgd(optax.constant_schedule(0.1)),
}
OTHER_STEPS = {
    "adam": optax.adam(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "little momentum": optax.sgd(0.1, momentum=1e-3),
    "injected momentum": injected(learning_rate=0.1, momentum=0.9),
    "weight decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "clipping": optax.chain(optax.clip_by_global_norm(1e3), optax.sgd(0.1)),
    "clipping values": optax.chain(optax.clip(50.0), optax.sgd(0.1)),
    "late schedule": optax.sgd(optax.piecewise_constant_schedule(0.1, {50_000: 0.5})),
    "injected schedule": injected(learning_rate=optax.cosine_decay_schedule(0.1, 10**6)),
    "named adam": named(optax.adam(0.1)),
    "one leaf at another rate": optax.chain(
        optax.masked(optax.scale(2.0), {n: n == "head.bias" for n in toy.SHARED}), optax.sgd(0.1)
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_scaffold_knows_plain_sgd(name):
    fp.algorithms.scaffold(PLAIN[name], learning_rate=0.1).check(
        toy.KINDS, 4
    )  # warnings are errors
    with pytest.raises(fp.InputError, match=r"step size 0\.1, but learning_rate = 0\.2"):
        fp.algorithms.scaffold(PLAIN[name], learning_rate=0.2).check(toy.KINDS, 4)


@pytest.mark.parametrize("aggregator", [aggregators.flora_na, aggregators.lora_fair])
def test_control_variates_are_averaged_where_factors_combine_in_another_way(aggregator):
    algorithm = fp.algorithms.scaffold(optax.sgd(0.1), learning_rate=0.1, aggregator=aggregator())
    run = running.run(algorithm, model=toy.lora_model(dropout=0), rounds=1)
    for name, own in run.client_state["control"].items():
        assert_close(run.server["control"][name], np.mean(own, axis=0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OTHER_STEPS)
def test_scaffold_warns_of_an_optimizer_with_other_steps(name):
    algorithm = fp.algorithms.scaffold(OTHER_STEPS[name], learning_rate=0.1)
    with pytest.warns(UserWarning, match=r"learning_rate = 0\.1"):
        algorithm.check(toy.KINDS, 4)


def nova_length(optimizer, steps):
    """Returns ``‖a‖₁``: how far a number comes whose gradient is 1 in one step only, summed."""

    def end(gradients):
        x, state = {"x": jnp.zeros(())}, optimizer.init({"x": jnp.zeros(())})
        for g in gradients:
            updates, state = optimizer.update({"x": jnp.asarray(g)}, state, x)
            x = optax.apply_updates(x, updates)
        return float(x["x"])

    return sum(abs(end([float(i == j) for j in range(steps)])) for i in range(steps))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1),
        optax.sgd(0.1, momentum=0.7),
        injected(learning_rate=0.1, momentum=0.7),
        optax.sgd(0.1, momentum=0.7, nesterov=True),
        optax.sgd(optax.linear_schedule(0.0, 0.3, 3)),
        optax.chain(optax.clip_by_global_norm(5.0), optax.sgd(0.1, momentum=0.5)),
    ],
    ids=["sgd", "momentum", "injected", "nesterov", "warm-up", "clipping that does not bite"],
)
@pytest.mark.sample("nesterov", "warm-up")
def test_fednova_measures_the_weight_of_gradients(optimizer):
    lengths = [nova_length(optimizer, steps) for steps in (1, 2)]
    alone, plain = ([(0, 1.0, [[0]])], [(1, 2.0, [[1], [2]])]), fp.algorithms.fedavg(optimizer)
    moves = [Quadratics(plain).round(rows) for rows in alone]
    effective = (lengths[0] + 2 * lengths[1]) / 3
    directions = [m / n if n else 0.0 for m, n in zip(moves, lengths, strict=True)]
    expected = effective * (directions[0] + 2 * directions[1]) / 3
    assert Quadratics(fp.algorithms.fednova(optimizer)).round() == approx(expected, rel=1e-5)


def test_fednova_counts_the_steps_of_adam_and_does_not_change_masked_leaves():
    rig, plain = (
        Quadratics(fp.algorithms.fednova(optax.adam(0.1))),
        fp.algorithms.fedavg(optax.adam(0.1)),
    )
    ends = [Quadratics(plain).round(rows) for rows in ([(0, 1.0, [[0]])], [(1, 2.0, [[1], [2]])])]
    expected = 5 / 3 * (ends[0] + 2 * ends[1] / 2) / 3
    assert rig.round() == approx(expected, rel=1e-5)

    still = optax.masked(optax.set_to_zero(), {n: n in toy.HEAD for n in toy.SHARED})
    algorithm = fp.algorithms.fednova(optax.chain(optax.sgd(RATE), still))
    whole = toy.Engine(algorithm, FEDERATION, per_round=4, lanes=2, bound=MODEL)
    result = whole.run(whole.schedule.cohort(1))
    for n in toy.HEAD:
        np.testing.assert_array_equal(result.server[n], MODEL.trainable[n])
    for n in toy.ADAPTER:
        assert np.abs(result.server[n] - MODEL.trainable[n]).max() > 1e-3


def test_fednova_measures_each_leaf_by_itself():
    """Some leaves have momentum, others do not."""
    slow, heavy = optax.sgd(RATE), optax.sgd(RATE, momentum=0.6)
    labels = {n: "heavy" if n in toy.HEAD else "slow" for n in toy.SHARED}
    mixed = optax.multi_transform({"heavy": heavy, "slow": slow}, labels)
    plain = toy.Engine(fp.algorithms.fedavg(mixed), FEDERATION, per_round=4, lanes=2, bound=MODEL)
    everybody = plain.schedule.cohort(1)
    ends = [plain.run(Cohort(*([x[k]] for x in everybody))).server for k in range(4)]
    nova = toy.Engine(fp.algorithms.fednova(mixed), FEDERATION, per_round=4, lanes=2, bound=MODEL)
    result = nova.run(everybody).server
    steps, weights = np.array([2, 1, 3, 1]), np.array(SIZES) / sum(SIZES)
    for n in toy.SHARED:
        start = MODEL.trainable[n]
        rho = 0.6 if n in toy.HEAD else 0.0
        length = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        directions = [(end[n] - start) / a for end, a in zip(ends, length, strict=True)]
        expected = start + weights @ length * np.tensordot(weights, np.stack(directions), 1)
        assert_close(result[n], expected, rtol=0, atol=1e-5)
