"""Bytes and simulated seconds equal numbers computed by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import running
import toy
from closeness import approx
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import Ledger, Method, assign_roles, config, forecast, pairs
from refusals import refusals, refused
from small_config import small

import fedjax_peft as fp
from fedjax_peft import InputError, TimeModel, algorithms, lora, transforms, tree
from fedjax_peft.simulation.cost import Costs

pytestmark = pytest.mark.slow

SGD, SIZES = optax.sgd(0.1), (9, 4, 0, 1, 13, 5, 6, 2)
# Two layers, query and value of 32 x 32, rank 2: A is 32 x 2 and B 2 x 32, 4 bytes a number.
ADAPTER = 2 * 2 * (32 * 2 + 2 * 32) * 4
# The pooler's 32 x 32 and the classifier's 32 x 4, with their biases.
HEAD = (32 * 32 + 32 + 32 * 4 + 4) * 4
# The toy's A is 5 x 2 and B 2 x 6; its head 6 x 3 with a bias.
A, B, TOY_HEAD = 5 * 2 * 4, 2 * 6 * 4, (6 * 3 + 3) * 4
TOY_ADAPTER = A + B
SVD = Method("lora", {}, lambda *_: None, start_shapes_frozen=True)


def ledger(algorithm, model=None, *, clients=4, ranks=None, transform=None):
    model = model or toy.model()
    names = assign_roles(model.kinds, algorithm.roles)
    server = algorithm.server.init(tree.select(model.trainable, names["shared"]))
    return Ledger(model, algorithm, server, clients, ranks, transform)


def moved(algorithm, model):
    """Returns the bytes of an upload, a first download, a later one, and a late first one."""
    one = ledger(algorithm, model)
    first = one.down(0)
    one.record({"round": 1, "clients": [0], "dropped": []})
    return one.up(0), first, one.down(0), one.down(1)


def all_of(n):
    return (n,) * 4


# ------------------------------------------------------------------------------------------- bytes


def test_bytes_follow_from_roles_and_dtypes():
    model = fp.attach(fp.testing.tiny_model(), lora(rank=2), seed=0)
    assert moved(fp.algorithms.fedavg(SGD), model) == all_of(ADAPTER + HEAD)
    assert moved(fp.algorithms.fedavg(SGD, head="private"), model) == all_of(ADAPTER)
    assert moved(fp.algorithms.fedavg(SGD, head="frozen"), model) == all_of(ADAPTER)
    assert moved(fp.algorithms.local(SGD), model) == all_of(0)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.trainable)
    assert moved(fp.algorithms.fedavg(SGD), model.replace(trainable=half)) == all_of(
        (ADAPTER + HEAD) // 2
    )


def test_bytes_equal_the_size_of_the_sent_leaves():
    plain = fp.algorithms.fedavg(SGD)
    down = plain.server._replace(
        broadcast=lambda state: {"model": state, "control": state, "last": jnp.zeros(3, bool)},
        template=lambda state: {"layer.lora_b": state["layer.lora_b"]},
    )
    one = ledger(plain._replace(server=down))
    assert (one.up(0), one.down(0)) == (B, 2 * (TOY_ADAPTER + TOY_HEAD) + 3)
    # Of the broadcast of a LoRA leaf, wherever it lies, a client of rank 1 needs one half.
    one = ledger(plain._replace(server=down), ranks=[1, 2])
    assert (one.up(0), one.down(0)) == (B // 2, TOY_ADAPTER + 2 * TOY_HEAD + 3)
    assert (one.up(3), one.down(3)) == (B, 2 * (TOY_ADAPTER + TOY_HEAD) + 3)


@pytest.mark.parametrize(
    ("transform", "extra"),
    [
        (transforms.top_directions(1, error_feedback=False), 1),  # an index
        (transforms.top_k(0.8, across_leaves=True, error_feedback=False), 3),  # a bitmap
    ],
)
def test_what_a_transform_sends_may_be_all_that_a_client_owns(transform, extra):
    algorithm = fp.algorithms.fedavg(SGD, head="frozen")
    one = ledger(algorithm, ranks=[1, 2], transform=transform)
    assert one.up(0) == TOY_ADAPTER // 2 + extra
    assert one.up(1) == ledger(algorithm, transform=transform).up(0) >= one.up(0)
    one = ledger(algorithm, ranks=[1, 2], transform=transforms.downlink(transform))
    assert one.down(0) == TOY_ADAPTER // 2 + extra


def test_a_client_downloads_the_changes_since_its_last_round():
    one = ledger(fp.algorithms.fedavg(SGD, head="frozen"), clients=5)
    everything = TOY_ADAPTER

    def after(number, clients, **more):
        one.record({"round": number, "clients": clients, "dropped": [], **more})
        return [one.down(c) for c in range(5)]

    assert after(0, []) == [everything] * 5
    assert after(1, [0, 1], skipped_leaves=["layer.lora_a"]) == [B, B, *[everything] * 3]
    assert after(2, [1], skipped_leaves=["layer.lora_b"]) == [everything, A, *[everything] * 3]
    # Nothing taken, nothing changed; but who was there has what there is.
    assert after(3, [2], dropped=[2])[:3] == [everything, A, 0]
    assert after(4, [], failed=[0], late=[1]) == [0, 0, 0, everything, everything]
    assert after(5, [3, 4], dropped=[4]) == [everything] * 5
    assert one.up(0, ["layer.lora_a"]) == B
    assert one.up(0, ["layer.lora_a", "layer.lora_b"]) == 0


def test_an_svd_start_is_fetched_once_it_is_not_the_broadcast_any_more():
    model = fp.attach(fp.testing.tiny_model(), lora(rank=2, init="svd"), seed=0)
    both = ADAPTER + HEAD
    assert moved(fp.algorithms.fedavg(SGD), model) == (both, both, both, both + ADAPTER)
    shared = moved(fp.algorithms.fedavg(SGD, head="private"), model)
    assert shared == (ADAPTER, ADAPTER, ADAPTER, 2 * ADAPTER)
    assert moved(fp.algorithms.local(SGD), model) == all_of(0), "nobody asks a server"
    assert moved(fp.algorithms.centralised(SGD), model)[1:] == (0, 0, 0), "it is in one place"


def test_the_first_job_at_an_asynchronous_server_takes_the_svd_start_too():
    algorithm = fp.algorithms.fedavg(SGD, head="private")
    time = TimeModel(2.0, 8e3, 16e3, 0.25)
    costs = Costs(ledger(algorithm, toy.model(method=SVD)), time, np.ones(4), None)
    plain = 2 * 3 + 0.5 + TOY_ADAPTER * (8 / 8e3 + 8 / 16e3)
    start = TOY_ADAPTER * 8 / 16e3
    for first, version, more in ((True, 0, 0), (True, 1, start), (False, 1, 0)):
        assert costs.job_seconds(0, 3, first=first, version=version) == approx(plain + more)


def test_an_svd_start_of_leaves_that_are_never_sent():
    own_b = fp.algorithms.fedavg(SGD)._replace(
        roles=fp.contracts.Roles(shared=("lora_a$",), private=("lora_b$", "^head:"))
    )
    model = toy.model(method=SVD)
    assert moved(own_b, model) == (A, A + B, A, A + A + B)
    still = ledger(fp.algorithms.fedavg(SGD, head="private"), model)
    still.record({"round": 1, "clients": [0], "dropped": [], "skipped_leaves": ["layer.lora_a"]})
    assert still.down(1) == A + B + B, "A is the initial one still"


def test_bytes_of_uploads_that_the_server_relays():
    stacked = fp.algorithms.fedavg(SGD, head="frozen")
    server = stacked.server._replace(frozen_delta=lambda state: {"layer.kernel": jnp.zeros((5, 6))})
    one = ledger(
        stacked._replace(server=server, traffic=fp.contracts.Traffic(relayed_leaves=r"lora_b$")),
        ranks=[1, 2],
    )
    start, dense = [TOY_ADAPTER // 2, TOY_ADAPTER], 5 * 6 * 4
    a, b = [A // 2, A], [B // 2, B]  # by rank
    assert [one.down(c) for c in range(4)] == start * 2, "nothing has been passed on yet"
    one.record({"round": 1, "clients": [0, 1, 2], "dropped": [2]})
    # B of ranks 1 and 2, the third could not be used. From those a client makes its own.
    stack = b[0] + b[1]
    assert [one.down(c) for c in range(4)] == [
        a[0] + stack,
        a[1] + stack,
        a[0] + stack,
        a[1] + stack,  # the first time for client 3: it makes its B too, from all stacks
    ]
    one.record({"round": 2, "clients": [0], "dropped": []})
    assert one.down(0) == a[0] + b[0], "only the round since"
    assert one.down(1) == a[1] + stack + b[0]
    one.record({"round": 3, "clients": [2, 0], "dropped": []})
    assert one.down(1) == a[1] + stack + 3 * b[0]
    one.record({"round": 4, "clients": [0, 2], "dropped": []})
    # Meanwhile the matrix, and what it is added to, are less than all the factors.
    assert stack + 5 * b[0] > dense + b[1]
    assert one.down(1) == a[1] + b[1] + dense
    assert one.down(3) == a[1] + b[1] + dense
    assert one.down(2) == a[0] + 2 * b[0]
    one.record({"round": 5, "clients": [0], "dropped": [], "skipped_leaves": ["layer.lora_b"]})
    assert one.down(0) == a[0], "neither sent nor passed on"


@pytest.mark.parametrize("name", ["flora", "fedex"])
def test_a_newcomer_makes_the_adapter_from_the_stacks(name):
    model = fp.attach(fp.testing.tiny_model(), lora(rank=2), seed=0)
    one = ledger(getattr(algorithms, name)(SGD), model)
    assert one.down(3) == ADAPTER + HEAD, "the initial one: there is no stack yet"
    one.record({"round": 1, "clients": [0, 1], "dropped": []})
    assert one.down(3) == one.down(0) == 2 * ADAPTER + HEAD
    one.record({"round": 2, "clients": [0, 1], "dropped": []})
    assert (one.down(0), one.down(3)) == (2 * ADAPTER + HEAD, 4 * ADAPTER + HEAD)
    for number in range(3, 80):
        one.record({"round": number, "clients": [0, 1], "dropped": []})
    dense = sum(model.frozen[f"{p}.base.kernel"].nbytes for p in pairs(model.trainable))
    # FLoRA's clients draw A themselves; the factors of FedEx are averages.
    assert one.down(3) == dense + HEAD + ADAPTER * (name == "fedex")


@functools.cache
def bound(svd):
    return toy.model(dropout=0, method=SVD if svd else None)


FEDAVG, CLIENTS = fp.algorithms.fedavg(SGD), toy.clients(SIZES)


def run(algorithm=FEDAVG, *, svd=False, rounds=6, **options):
    time = TimeModel(2.0, 8e3, 16e3, 0.25)
    options = {"model": bound(svd), "clients_per_round": 3, "time_model": time, **options}
    return running.run(algorithm, clients=CLIENTS, rounds=rounds, **options)


def byte_rows(result):
    return [(row["bytes_up"], row["bytes_down"]) for row in result.metrics]


def test_the_bytes_of_a_round_are_the_sum_over_its_clients():
    result = run()
    each = TOY_ADAPTER + TOY_HEAD
    counts = [0] + [len(row["clients"]) for row in result.metrics[1:]]
    assert set(counts[1:]) == {2, 3}, "the empty client moves nothing"
    assert byte_rows(result) == [(n * each, n * each) for n in counts]


def test_a_client_fetches_the_svd_start_at_its_first_round_but_the_runs_first():
    result = run(fp.algorithms.fedavg(SGD, head="private"), svd=True)
    seen, expected = set(result.metrics[1]["clients"]), [(0, 0)]
    for row in result.metrics[1:]:
        new = set(row["clients"]) - seen
        seen |= new
        up = TOY_ADAPTER * len(row["clients"])
        expected.append((up, up + TOY_ADAPTER * len(new)))
        seconds = {c: 2.0 * -(-SIZES[c] // 4) + TOY_ADAPTER * 8 / 16e3 * (c in new) for c in seen}
        slowest = max(seconds[c] for c in row["clients"])
        each = 0.5 + TOY_ADAPTER * (8 / 8e3 + 8 / 16e3)
        assert row["simulated_seconds"] == approx(slowest + each)
    assert byte_rows(result) == expected
    extra = [down > up for up, down in expected]
    assert extra[:2] == [False, False]
    assert {True, False} <= set(extra[2:]), "clients come for the first time, and come back"


def alternating(broadcast, number):
    """A in odd rounds, B in even ones."""
    del broadcast
    return {"layer.lora_a": number % 2 == 1, "layer.lora_b": number % 2 == 0}


def test_leaves_that_rest_are_not_sent_and_rows_say_so():
    turns = fp.algorithms.fedavg(SGD, head="frozen")._replace(
        traffic=fp.contracts.Traffic(alternating)
    )
    rows = run(turns).metrics[1:]
    version, have, expected = {A: 0, B: 0}, {}, []  # of A and B, named by their bytes
    for row in rows:
        moves, rests = (A, B) if row["round"] % 2 else (B, A)
        assert row["skipped_leaves"] == ["layer.lora_b" if rests == B else "layer.lora_a"]
        down = 0
        for client in row["clients"]:
            versions = have.get(client, {A: None, B: None})
            down += sum(size for size in (A, B) if versions[size] != version[size])
            have[client] = dict(version)
        version[moves] = row["round"]
        expected.append((moves * len(row["clients"]), down))
    assert [(row["bytes_up"], row["bytes_down"]) for row in rows] == expected
    assert any(down % TOY_ADAPTER for _, down in expected), "somebody lacks one of the two only"


# -------------------------------------------------------------------------------------------- time


def test_the_time_model_by_hand():
    model = TimeModel(2.0, bandwidth_up=8e3, bandwidth_down=16e3, latency=0.25)
    # 3 steps of 2 s; 1000 bytes at 1000 a second; 4000 bytes at 2000 a second; 0.25 s each way.
    assert model.round_seconds(3, 1000, 4000) == approx(6 + 1 + 2 + 0.5)
    assert model.round_seconds(3, 1000, 4000, 1.5) == approx(9 + 1 + 2 + 0.5)
    assert model.round_seconds(3, 0, 0) == 6
    assert TimeModel().round_seconds(2, 3_125_000, 0) == approx(1 + 1 + 0.8)


def test_presets():
    assert TimeModel.preset() == TimeModel.preset("default") == TimeModel()
    paper = TimeModel.preset("fedadapters")
    assert paper.round_seconds(0, 10 * 2**20, 20 * 2**20) == approx(3.0), "MiB"
    assert paper.clients_seconds({}, {0: 2**20, 1: 2**20}, {0: 0, 1: 0}, [1, 1])[1] == 0.2
    assert paper.preload
    assert TimeModel.preset("fedadapters", spread=0.5, latency=0.0) == paper._replace(spread=0.5)
    federa = TimeModel.preset("federa", device="orin_full")
    assert federa.round_seconds(8, 408_576, 408_576) == approx(4.59 + 0.96)
    assert federa.transfer_seconds(1, 1) == 0.96, "no less than the smallest that was measured"
    assert federa.transfer_seconds(0, 0) == 0
    own = TimeModel.preset("federa", bandwidth_up="8 kbit/s", bandwidth_down=16e3, latency=0.25)
    assert own == TimeModel(0.5, 8e3, 16e3, 0.25, svd_seconds=8.62), "a link of one's own"
    both = TimeModel.preset("federa", device="orin_full", seconds_per_step="measured")
    assert both.seconds_per_step == "measured"
    for preset in ("default", "federa", "fedadapters"):
        TimeModel.preset(preset).check()
    uneven = TimeModel.preset(transfers=[[1000, 1.0], [2000.0]])
    refused("must be pairs of bytes and seconds", uneven.check)
    with pytest.raises(InputError, match=r"no time model 'fedadapter'. Did you mean 'fedadapters'"):
        TimeModel.preset("fedadapter")
    refused(r"no device 'orin'. Did you mean 'orin_", TimeModel.preset, "federa", device="orin")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25 Mbit/s", 25e6),
        ("10 MB/s", 80e6),
        ("10 MiB/s", 83_886_080),
        ("1.5GiB/s", 1.5 * 8 * 2**30),
        ("2 kB/s", 16e3),
        ("3 bit/s", 3),
    ],
)
def test_rates_have_units(text, rate):
    assert TimeModel.preset(bandwidth_up=text).bandwidth_up == rate


@pytest.mark.parametrize("text", ["10", "10 MB", "10 Mb/s", "MB/s", "1.2.3 MB/s", "-3 MB/s"])
def test_rates_that_cannot_be_read(text):
    refused(r"bandwidth_down = .* is no rate.*'10 MiB/s'", TimeModel.preset, bandwidth_down=text)


STEPS, UP, DOWN = {0: 3, 1: 1}, {0: 1000, 1: 3000}, {0: 2000, 1: 2000, 2: 4000}


def test_topologies_by_hand():
    """Links of 1000 bytes a second up and 2000 down; client 2 downloads only."""
    own = TimeModel(2.0, 8e3, 16e3, 0.25)
    slowness = [1.0, 2.0, 1.0]
    seconds = own.clients_seconds(STEPS, UP, DOWN, slowness)
    assert seconds == {0: 6 + 1 + 1 + 0.5, 1: 4 + 3 + 1 + 0.5, 2: 2 + 0.5}
    serial = own._replace(topology="serial").clients_seconds(STEPS, UP, DOWN, slowness)
    transfers = 2.5 + 4.5 + 2.5
    assert serial == {0: 6 + transfers, 1: 4 + transfers, 2: transfers}
    # 4000 bytes up and 8000 down through a server of 2000 bytes a second: 2 s up, 4 s down.
    shared = own._replace(topology="shared", server_bandwidth=16e3)
    seconds = shared.clients_seconds(STEPS, UP, DOWN, slowness)
    assert seconds == {0: 6 + 2 + 4 + 0.5, 1: 4 + 3 + 4 + 0.5, 2: 4 + 0.5}
    wide = shared._replace(server_bandwidth=1e12)
    parallel = own.clients_seconds(STEPS, UP, DOWN, slowness)
    assert wide.clients_seconds(STEPS, UP, DOWN, slowness) == approx(parallel)
    for time in (own, shared, own._replace(topology="serial")):
        assert time.round_seconds(1, 0, 0) == 2, "no bytes, no latency"
        assert time.clients_seconds({}, {}, {}, slowness) == {}


def test_measured_transfers_are_interpolated_linearly():
    time = TimeModel(0.0, transfers=((100.0, 1.0), (300.0, 2.0), (400.0, 4.0)))
    pairs = {50: 1, 100: 1, 200: 1.5, 300: 2, 350: 3, 400: 4, 500: 6}
    assert {size: time.transfer_seconds(size, size) for size in pairs} == pairs
    assert time.transfer_seconds(100, 300) == 1.5, "the mean of both ways"
    assert TimeModel(transfers=((100.0, 1.0),)).transfer_seconds(900, 900) == 1


def test_rows_use_topology_preload_and_the_svd():
    plain = TimeModel(2.0, 8e3, 16e3, 0.25)
    serial = plain._replace(topology="serial")
    for model in (plain, serial, plain._replace(spread=1.0)):
        factor = model.slowness(8, seed=0)
        for row in run(rounds=2, time_model=model).metrics[1:]:
            each = (TOY_ADAPTER + TOY_HEAD) * (8 / 8e3 + 8 / 16e3) + 0.5
            steps = max(-(-SIZES[c] // 4) * factor[c] for c in row["clients"])
            transfers = each * (len(row["clients"]) if model == serial else 1)
            assert row["simulated_seconds"] == approx(2 * steps + transfers)
    usual = byte_rows(run(svd=True))
    first = plain._replace(preload=True, svd_seconds=7.0)
    result = run(svd=True, time_model=first)
    frozen = sum(x.nbytes for x in result.model.frozen.values())
    seen = set()
    for row, (up, down) in zip(result.metrics, usual, strict=True):
        new = set(row.get("clients", ())) - seen
        seen |= new
        assert (row["bytes_up"], row["bytes_down"]) == (up, down + frozen * len(new))
    assert result.metrics[0]["simulated_seconds"] == 7
    random = run(rounds=1, time_model=first)
    assert random.metrics[0]["simulated_seconds"] == 0, "a random start has no SVD"
    whole = {"clients": 8, "clients_per_round": 3, "rounds": 2, "steps": 2, "time_model": plain}
    costs = forecast(random.model, fp.algorithms.fedavg(SGD), **whole)
    each = TOY_ADAPTER + TOY_HEAD
    assert costs[:2] == (2 * 3 * each, 2 * 3 * each)
    assert costs.seconds == approx(2 * (4 + 0.5 + each * (8 / 8e3 + 8 / 16e3)))


def test_a_config_can_replace_settings_of_a_time_preset():
    def built(**time):
        return TimeModel.preset(**config.resolve(small(time=time))["time"])

    rate = 10.0 * 8 * 2**20
    expected = TimeModel("measured", rate, rate, 0.0, topology="serial", preload=True)
    assert built(preset="fedadapters", seconds_per_step="measured") == expected
    expected = TimeModel(bandwidth_up=80e6, topology="shared", server_bandwidth=1e9)
    link = {"bandwidth_up": "10 MB/s", "server_bandwidth": "1 Gbit/s"}
    assert built(**link, topology="shared") == expected
    refused(r"\[time\] 'preset' cannot be 'fedadapter'", built, preset="fedadapter")


def test_slowness_is_lognormal_and_a_clients_own():
    model = TimeModel(spread=0.5)
    many = np.log(model.slowness(3000, seed=0))
    assert (many.mean(), many.std()) == (approx(0, abs=0.03), approx(0.5, abs=0.03))
    assert model.slowness(10, seed=0) == model.slowness(3000, seed=0)[:10]
    assert model.slowness(10, seed=0) != model.slowness(10, seed=1)
    assert TimeModel().slowness(3, seed=0) == [1, 1, 1]


def test_local_training_has_no_bytes_and_computation_time_only():
    result = run(fp.algorithms.local(SGD), svd=True, rounds=2)
    assert byte_rows(result) == [(0, 0)] * 3
    for row in result.metrics[1:]:
        assert row["simulated_seconds"] % 2 == 0


def test_measured_seconds_are_those_of_the_round():
    result = run(rounds=2, time_model=TimeModel("measured", latency=0.0))
    for row in result.metrics[1:]:
        moved = (TOY_ADAPTER + TOY_HEAD) * 16 / 25e6
        longest = max(-(-SIZES[c] // 4) for c in row["clients"])
        share = row["time"]["train_s"] * longest / row["steps"]
        assert row["simulated_seconds"] == approx(share + moved)


def test_the_measured_seconds_of_a_single_step_are_its_own():
    time = TimeModel("measured", latency=0.0)
    costs = Costs(ledger(fp.algorithms.local(SGD)), time, np.ones(4), None)
    row = {"round": 1, "clients": [0], "dropped": []}
    assert costs.charge(row, {0: 1}, 3.0)["simulated_seconds"] == approx(3.0)


def test_who_is_late_and_how_long_the_server_waits():
    one = ledger(fp.algorithms.fedavg(SGD, head="frozen"))
    time = TimeModel(1.0, 8 * A, 8 * TOY_ADAPTER, 0.25)  # A is sent in a second, all is got in one
    costs = Costs(one, time, [1.0, 1.0, 2.0, 1.0], deadline=6.0)
    seconds = 1 + 1 + B / A + 0.5  # to get both, to send A and B, two latencies
    steps = {0: 3, 1: 2, 2: 2, 3: 1}
    # A step takes client 2 two seconds.
    assert costs.late(steps) == {0: int(6 - seconds), 2: int((6 - seconds) / 2)}
    assert costs.late(steps, ["layer.lora_b"]) == {2: 1}, "less to send"
    row = {"round": 1, "clients": [1, 3], "dropped": [], "failed": [], "late": [0, 2]}
    assert costs.charge(row, {1: 2, 3: 1}, 9.0) == {
        "bytes_up": 2 * TOY_ADAPTER,
        "bytes_down": 4 * TOY_ADAPTER,
        "simulated_seconds": 6.0,
    }
    row = {"round": 2, "clients": [1], "dropped": [], "failed": [3], "late": []}
    assert costs.charge(row, {1: 2}, 9.0) == {
        "bytes_up": TOY_ADAPTER,
        "bytes_down": 2 * TOY_ADAPTER,
        "simulated_seconds": approx(2 + seconds),
    }
    row = {"round": 3, "clients": [], "dropped": [], "failed": [0], "late": []}
    assert costs.charge(row, {}, 9.0)["simulated_seconds"] == 1.5, "it had fetched the broadcast"
    row = {"round": 4, "clients": [], "dropped": []}
    assert set(costs.charge(row, {}, 9.0).values()) == {0}


@functools.cache
def fresh_ledger():
    return ledger(fp.algorithms.fedavg(SGD, head="frozen"))


@settings(deadline=None)
@given(
    steps=st.lists(st.integers(1, 500), min_size=4, max_size=4),
    slowness=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    a_step=st.one_of(st.just(0.0), st.floats(1e-4, 10)),
    deadline=st.floats(0.1, 1000),
    topology=st.sampled_from(["parallel", "serial", "shared"]),
)
def test_late_clients_send_all_steps_that_fit_and_none_more(
    steps, slowness, a_step, deadline, topology
):
    shared = 2e3 if topology == "shared" else None
    time = TimeModel(a_step, 1e3, 2e3, 0.1, topology=topology, server_bandwidth=shared)
    costs = Costs(fresh_ledger(), time, slowness, deadline)
    wanted = dict(enumerate(steps))
    late = costs.late(wanted)
    sent = wanted | late
    assert all(0 <= late[c] < wanted[c] for c in late)

    def ends(made):
        bytes_ = dict.fromkeys(range(4), TOY_ADAPTER)
        return time.clients_seconds(made, bytes_, bytes_, slowness)

    one_more = ends({c: n + 1 for c, n in sent.items()})
    for client, seconds in ends(sent).items():
        assert seconds <= deadline or not sent[client], "it sends no more than fits"
        assert client not in late or one_more[client] > deadline, "it sends all that fits"


test_a_time_model_that_cannot_be = refusals(
    lambda fields: run(time_model=TimeModel(**fields)),
    ({"seconds_per_step": -1}, "seconds_per_step = -1 .* from 0 up or 'measured'"),
    ({"seconds_per_step": "slow"}, "seconds_per_step = 'slow' .* must be"),
    ({"bandwidth_up": 0}, "bandwidth_up = 0 .* must be a positive number"),
    ({"bandwidth_down": math.inf}, "bandwidth_down = inf .* must be a positive number"),
    ({"latency": math.nan}, "latency = nan .* must be a number from 0 up"),
    ({"spread": -0.5}, "spread = -0.5 .* must be a number from 0 up"),
    ({"svd_seconds": -1}, "svd_seconds = -1 .* must be a number from 0 up"),
    ({"topology": "series"}, "no topology 'series'. Did you mean 'serial'"),
    ({"topology": "shared"}, "server_bandwidth is what the topology 'shared' needs"),
    ({"server_bandwidth": 1e6}, "server_bandwidth is what the topology 'shared' needs"),
    ({"topology": "shared", "server_bandwidth": 0}, "server_bandwidth = 0 .* positive"),
    (
        {"topology": "shared", "server_bandwidth": 1e6, "transfers": ((1.0, 1.0),)},
        "Measured transfers say nothing of a link that clients share",
    ),
    ({"transfers": ((2.0, 1.0), (1.0, 2.0))}, "pairs of bytes and seconds"),
    ({"transfers": ((1.0, 0.0),)}, "both positive and increasing"),
    ({"transfers": ((1.0, 2.0), (2.0,))}, "must be pairs of bytes and seconds, both"),
    ({"transfers": ((1.0, 2.0, 3.0),)}, "time model must be pairs"),
    ({"transfers": ((1.0, math.inf),)}, "inf.* must be pairs"),
    ({"transfers": 5}, "transfers = 5 .* must be pairs"),
)
