"""When clients are available: each model by its definition, and the contract of all."""

from pathlib import Path

import numpy as np
import pytest
import running
import toy
from closeness import approx, roughly
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.availability import draws
from fedjax_peft.availability.draws import uniforms
from fedjax_peft.availability.markov import _Events

CLIENTS = np.arange(200)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "trace.csv"
    path.write_text(
        "client,start,end\n3,100,200\n0,50,80\n0,0,20\n0,70,90\n\n150,0,40.5\n3,250,300\n"
    )
    return str(path)


@pytest.fixture(scope="module")
def models(lines):
    return {
        "diurnal": fp.availability.diurnal(100.0, share=0.4),
        "markov": fp.availability.markov(30.0, 50.0),
        "trace": fp.availability.trace(lines),
        "repeated trace": fp.availability.trace(lines, period=300.0),
    }


@pytest.mark.parametrize("name", ["diurnal", "markov", "trace", "repeated trace"])
@settings(max_examples=25, deadline=None)
@given(time=st.floats(0, 2000.0), seed=st.integers(0, 5))
def test_the_next_change_is_the_next_change(models, name, time, seed):
    at = models[name].at
    there, until = at(seed, CLIENTS, time)
    some, ends = at(seed, CLIENTS[::7], time)  # a client does not depend on the others
    assert np.array_equal(there[::7], some)
    assert np.array_equal(until[::7], ends)
    assert there.dtype == bool
    assert np.all(until > time)
    for share in (0.3, 0.9):  # nothing changes in between
        soon = np.minimum(until, time + 500.0)
        middle = time + share * (soon - time)
        for client in range(0, 200, 37):
            again, then = at(seed, CLIENTS[[client]], float(middle[client]))
            assert again[0] == there[client]
            assert then[0] == approx(until[client])
    for client in np.flatnonzero(np.isfinite(until))[::37]:
        after = float(until[client]) + 1e-6
        changed, _ = at(seed, CLIENTS[[client]], after)
        assert changed[0] != there[client]


def test_diurnal_by_hand():
    at = fp.availability.diurnal(100.0, share=0.25, spread=0.0).at
    ids = np.arange(2)
    for time, there, until in [(0.0, True, 25.0), (25.0, False, 100.0), (310.0, True, 325.0)]:
        found = at(0, ids, time)
        assert found[0].tolist() == [there] * 2
        assert found[1].tolist() == [until] * 2
    always, never_ends = fp.availability.diurnal(100.0, share=1.0).at(0, ids, 7.0)
    assert always.all()
    assert np.isinf(never_ends).all()


def test_diurnal_spreads_the_days():
    at = fp.availability.diurnal(100.0, share=0.4).at
    ids = np.arange(4000)
    shares = [at(0, ids, time)[0].mean() for time in (0.0, 33.0, 500.0)]
    assert shares == roughly([0.4] * 3, abs=0.03)
    together = fp.availability.diurnal(100.0, share=0.4, spread=0.1).at
    assert together(0, ids, 30.0)[0].all()
    assert not together(0, ids, 60.0)[0].any()


def test_markov_is_the_chain_with_these_means():
    """Shares, mean remaining times (no memory) and the correlation over time, in closed form."""
    on, off = 30.0, 50.0
    at = fp.availability.markov(on, off).at
    ids = np.arange(40_000)
    now, until = at(0, ids, 500.0)
    share = on / (on + off)
    assert now.mean() == approx(share, abs=0.01)
    assert (until - 500)[now].mean() == approx(on, rel=0.03)
    assert (until - 500)[~now].mean() == approx(off, rel=0.03)
    assert np.median((until - 500)[now]) == approx(on * np.log(2), rel=0.04)
    later = at(0, ids, 510.0)[0]
    stays = share + (1 - share) * np.exp(-10 * (1 / on + 1 / off))
    assert later[now].mean() == approx(stays, abs=0.012)
    start = at(0, ids, 0.0)[0]
    assert start.mean() == approx(share, abs=0.01), "stationary from the beginning"


def test_markov_with_unequal_means_needs_few_blocks(monkeypatch):
    """A week on and a minute off: the search for the next change does not go minute by minute."""
    blocks, times = [], _Events._times
    monkeypatch.setattr(_Events, "_times", lambda *given: blocks.append(0) or times(*given))
    there, until = fp.availability.markov(7 * 86_400.0, 60.0).at(0, CLIENTS, 1e6)
    assert len(blocks) < 20
    assert there.mean() > 0.98
    assert (until - 1e6)[there].mean() == approx(7 * 86_400.0, rel=0.3)


def test_a_repeated_trace_is_the_trace_written_out(tmp_path):
    """Also for a client that is there over midnight, and for one that is always there."""
    day, found = ["0,80,100", "0,0,20", "0,40,50", "1,0,100", "2,10,30"], []
    for repeats, period in ((1, 100.0), (9, None)):
        lines = [line.split(",") for line in day]
        moved = [
            f"{client},{int(start) + 100 * n},{int(end) + 100 * n}"
            for n in range(repeats)
            for client, start, end in lines
        ]
        path = tmp_path / f"{repeats}.csv"
        path.write_text("\n".join(["client,start,end", *moved]))
        at = fp.availability.trace(str(path), period).at
        found.append([at(0, np.arange(3), time) for time in np.arange(0.0, 700.0, 5.0)])
    for (there, until), (again, then) in zip(*found, strict=True):
        assert np.array_equal(there, again)
        assert np.array_equal(until[[0, 2]], then[[0, 2]])
        assert np.isinf(until[1])


def test_trace_by_hand(lines, tmp_path):
    at = fp.availability.trace(lines).at
    ids = np.array([0, 1, 3, 150])
    there, until = at(0, ids, 10.0)
    assert there.tolist() == [True, False, False, True]
    assert until.tolist() == [20.0, np.inf, 100.0, 40.5]
    excel = tmp_path / "excel.csv"
    excel.write_text(Path(lines).read_text(), encoding="utf-8-sig")
    assert fp.availability.trace(excel).at(0, ids, 10.0)[1].tolist() == until.tolist()
    there, until = at(0, ids, 60.0)
    assert until.tolist() == [90.0, np.inf, 100.0, np.inf], "overlapping intervals are joined"
    again = fp.availability.trace(lines, period=400.0).at
    there, until = again(0, ids, 395.0)
    assert there.tolist() == [False] * 4
    assert until.tolist() == [400.0, np.inf, 500.0, 400.0]
    assert again(0, ids, 855.0)[1].tolist() == [890.0, np.inf, 900.0, 1200.0]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a,b\n", "must begin with the line"),
        ("", "must begin with the line"),
        ("client,start,end\n", "no interval"),
        ("client,start,end\n0,5,5\n", "Line 2"),
        ("client,start,end\n0,1,2\n-1,1,2\n", "Line 3"),
        ("client,start,end\n0,nan,2\n", "Line 2"),
        ("client,start,end\n0,1,inf\n", "Line 2"),
        ("client,start,end\n0,1\n", "Line 2"),
        ("client,start,end\n0,1,2,3\n", "Line 2"),
        ("client,start,end\n99999999999999999999,1,2\n", "Line 2"),
        ("client,start,end\n\x00\xff", "trace"),
    ],
)
def test_hostile_traces_are_refused(tmp_path, text, match):
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode("latin-1"))
    refused(match, fp.availability.trace, str(path))


def test_wrong_arguments_are_refused(tmp_path, lines):
    for make, match in [
        (lambda: fp.availability.trace(str(tmp_path / "absent.csv")), "cannot be read"),
        (lambda: fp.availability.trace(lines, period=100.0), "before the end"),
    ]:
        refused(match, make)


def test_uniforms_are_uniform_and_depend_on_every_index():
    ids = np.arange(50_000)
    first = uniforms(0, "a", ids)
    assert np.histogram(first, 10, (0, 1))[0] == approx(5000, abs=300)
    others = [uniforms(1, "a", ids), uniforms(0, "b", ids), uniforms(0, "a", ids, np.int64(1))]
    for other in [*others, np.roll(first, 1)]:
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.02
    assert np.array_equal(uniforms(0, "a", ids[5:9]), first[5:9])


# ---------------------------------------------------------------- synchronous rounds


CLIENTS_OF_RUN = toy.clients([5, 9, 12, 7, 20, 3])


def simulated(availability, **options):
    time = fp.TimeModel(seconds_per_step=3.0, spread=1.0)
    given = {"clients": CLIENTS_OF_RUN, "clients_per_round": 3, "time_model": time, "rounds": 4}
    return running.run(**{**given, "eval_every": 100, "availability": availability, **options})


@pytest.fixture
def short(tmp_path):
    """Clients 0 to 2 are there at first; from 30 s on, all clients are."""
    path = tmp_path / "short.csv"
    rows = [f"{c},{0 if c < 3 else 30},{6 if c == 1 else 15 if c < 3 else 500}" for c in range(6)]
    rows += [f"{c},30,500" for c in range(3)]
    path.write_text("\n".join(["client,start,end", *rows]))
    return fp.availability.trace(str(path))


def test_rounds_draw_from_the_available_clients_and_wait(short):
    rows = simulated(short, rounds=6).metrics[1:]
    clock = 0.0
    for row in rows:
        opened = clock + row["waited"]
        everybody = {*row["clients"], *row["failed"]}
        there, until = short.at(0, np.arange(6), opened)
        assert {c for c in range(6) if there[c]} >= everybody
        assert row["available"] == there.sum()
        assert len(everybody) == min(3, row["available"])
        clock += row["simulated_seconds"]
        assert all(until[c] > opened for c in everybody)
    assert rows[0]["available"] == 3
    assert any(row["waited"] > 0 for row in rows), "nobody is there between 15 and 30 s"
    assert any(row["failed"] for row in rows), "somebody leaves too early"


@pytest.mark.parametrize(("leaves", "failed"), [(8, []), (4, [0])])
def test_a_part_that_has_arrived_is_not_lost(tmp_path, leaves, failed):
    """With 5 s a step, one of three steps is in time; client 0 leaves after it, or before."""
    path = tmp_path / "leaves.csv"
    path.write_text(f"client,start,end\n0,0,{leaves}\n1,0,1000\n")
    time = fp.TimeModel(5.0, latency=0.0, bandwidth_up=1e15, bandwidth_down=1e15)
    given = {"clients": toy.clients((12, 12)), "local_steps": 3, "rounds": 1, "time_model": time}
    given |= {"deadline": 9.0, "late": "partial", "eval_every": 100}
    row = running.run(**given, availability=fp.availability.trace(str(path))).metrics[1]
    assert (row["failed"], row["simulated_seconds"]) == (failed, approx(5.0))
    assert row["clients"] == row["partial"] == sorted({0, 1} - set(failed))


@pytest.mark.parametrize("sampling", ["size", "poisson", "round_robin", "all"])
def test_every_sampling_draws_from_the_available_clients(sampling):
    options = {} if sampling != "all" else {"clients_per_round": None}
    rows = simulated(fp.availability.markov(20.0, 20.0), sampling=sampling, **options).metrics[1:]
    assert all(len(row["clients"]) <= row["available"] for row in rows)
    assert any(row["clients"] for row in rows)


def test_what_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client,start,end\n0,0,5\n")
    refused("no round can begin", simulated, fp.availability.trace(str(path)), rounds=9)
    privacy = fp.privacy.central(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(fp.InputError, match="availability decides who can be drawn"):
        simulated(fp.availability.markov(), privacy=privacy, sampling="poisson")
    with pytest.raises(fp.InputError, match="not 'measured'"):
        simulated(fp.availability.markov(), time_model=fp.TimeModel("measured"))
    refused(r"is not an fp\.contracts\.Availability", simulated, "diurnal")


def test_bits_are_mixed_as_in_splitmix64():
    """The first outputs for the seed 1234567, as other implementations print them."""
    with np.errstate(over="ignore"):
        states = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * draws._ODD
        found = draws._mixed(states).tolist()
    assert found == [
        *(6457827717110365317, 3203168211198807973, 9817491932198370423),
        *(4593380528125082431, 16408922859458223821),
    ]
