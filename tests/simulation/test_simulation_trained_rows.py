"""A run that starts from another one is not tested on examples that the other was trained on."""

import functools

import numpy as np
import optax
import pytest
import toy
from internals import digests
from options import run_options
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.simulation.trained_rows import NAME, read_rows, trained_rows

ROWS = toy.dataset(40, seed=4)
SPLIT, OTHER = np.arange(30, dtype=np.int32), np.arange(20, 40, dtype=np.int32)
model = functools.cache(functools.partial(toy.model, dropout=0))
ALGORITHM = fp.algorithms.fedavg(optax.sgd(0.1))


def texts(lengths, width, **columns):
    """Returns texts of the given lengths, the n-th of which has tokens from 10 n on."""
    ids, mask = np.zeros((2, len(lengths), width), np.int32)
    for n, length in enumerate(lengths):
        ids[n, :length], mask[n, :length] = 10 * n + np.arange(length), 1
    return fp.Dataset({"input_ids": ids, "attention_mask": mask.astype(bool), **columns})


def test_an_example_is_known_by_what_the_model_reads():
    short, long = texts([3, 5, 2], 8), texts([3, 5, 2], 16)
    np.testing.assert_array_equal(digests(short), digests(long))
    assert len(set(digests(short).tolist())) == 3
    other = fp.Dataset({**ROWS.columns, "labels": ROWS.labels[::-1]}, ROWS.label_names)
    np.testing.assert_array_equal(digests(other), digests(ROWS))  # a new label for the same input
    own = digests(fp.Clients(ROWS, (SPLIT[3:5], SPLIT[:1])))
    np.testing.assert_array_equal(own, digests(ROWS)[[3, 4, 0]])


def test_packed_examples_are_those_before_packing():
    lengths = [3, 5, 2, 4, 1, 6]
    data = texts(lengths, 8, loss_mask=np.ones((6, 8), bool))
    clients = fp.Clients(data, (np.arange(4, dtype=np.int32), np.array([4, 5], np.int32)))
    packed = clients.pack(10)
    assert len(packed.data) < len(data)
    assert sorted(digests(packed)) == sorted(digests(data))


def test_an_example_that_stands_in_the_test_data_twice_does_not_count():
    twins = np.concatenate([ROWS.columns["x"][:12], ROWS.columns["x"][:2]])
    data = fp.Dataset({"x": twins, "labels": np.zeros(14, np.int32)}, ("only",))
    test = data.take(np.array([12, 13]))
    found = trained_rows(fp.Clients(data, (np.arange(12, dtype=np.int32),)), {"test": test}, None)
    np.testing.assert_array_equal(found, np.sort(digests(ROWS)[2:12]))


def run(rows, start=None, rounds=1, **options):
    """Returns a run whose two clients have halves of the rows."""
    options = {"test": ROWS.take(np.arange(30, 40)), "origin": start, **options}
    bound = model() if start is None else start.trained
    clients = fp.Clients(ROWS, tuple(np.array_split(rows, 2)))
    options = run_options(progress=False, batch_size=16, **options)
    return fp.simulate(bound, ALGORITHM, clients, rounds=rounds, **options)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return run(SPLIT, out=tmp_path_factory.mktemp("first") / "run")


@pytest.mark.parametrize(
    ("data", "count"),
    [
        ({"test": ROWS.take(np.arange(20))}, "20 of the 20 examples of test"),
        ({"validation": ROWS.take(np.arange(25, 35))}, "5 of the 10 examples of validation"),
        ({"client_test": fp.Clients(ROWS, (SPLIT[:3], OTHER[-2:]))}, "3 of the 5 .* client_test"),
        (
            {"client_validation": fp.Clients(ROWS, (SPLIT[:1], SPLIT[5:7]))},
            "3 of the 3 .* client_val",
        ),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_an_evaluation_on_what_the_origin_was_trained_on_is_refused(first, data, count):
    loaded = fp.load_run(first.out, model=model(), algorithm=ALGORITHM)
    for origin in (first, loaded):
        refused(f"{count}.* are training examples of", run, OTHER, origin, **data)


@pytest.mark.slow
def test_a_run_keeps_what_it_and_its_origins_were_trained_on(first, tmp_path):
    second = run(OTHER[:10], first, out=tmp_path / "run")
    np.testing.assert_array_equal(second.trained_on(), np.sort(digests(ROWS)[:30]))
    resumed = run(OTHER[:10], first, out=tmp_path / "run", resume=True)
    np.testing.assert_array_equal(resumed.trained_on(), second.trained_on())
    refused("30 of the 40 examples of test", run, OTHER, second, test=ROWS)


def test_a_run_that_kept_nothing_says_so_and_damage_is_named(first, tmp_path):
    for content in (b"", b"PK\x03\x04", (first.out / "params.safetensors").read_bytes()):
        (tmp_path / NAME).write_bytes(content)
        refused(f"{NAME} is damaged", read_rows, tmp_path)
    old = fp.load_run(first.out, model=model(), algorithm=ALGORITHM)
    object.__setattr__(old, "trained_on", lambda: None)
    with pytest.warns(UserWarning, match="does not say which examples it was trained on"):
        run(OTHER, old, test=ROWS)


def test_a_run_without_a_directory_computes_digests_when_they_are_asked_for(monkeypatch):
    """They take seconds for a million examples, and a sweep has many runs."""
    alone = run(SPLIT)
    with monkeypatch.context() as patch:
        patch.setattr(
            "fedjax_peft.simulation.trained_rows.digests", lambda data: pytest.fail("made")
        )
        run(SPLIT)
    np.testing.assert_array_equal(alone.trained_on(), np.sort(digests(ROWS.take(SPLIT))))
