"""Evaluators that share a compiled program: their results, and when they can."""

import numpy as np
import optax
import pytest
import toy
from closeness import assert_close

import fedjax_peft as fp
from fedjax_peft import Clients, Dataset, Placement, session

SIZES = (40, 9, 30, 21, 5)


@pytest.fixture(scope="module")
def federation():
    """Returns a session of clients with personal models, and its state."""
    algorithm = fp.algorithms.fedavg(optax.sgd(0.1), head="private")
    made = session(toy.model(), algorithm, toy.clients(SIZES), placement=Placement(lanes=1))
    return made, made.init(0)


@pytest.fixture(scope="module")
def test_set(federation):
    """Returns an evaluator of three clients on 90 examples; its program is compiled."""
    made, state = federation
    data = toy.dataset(90, seed=1)
    members = [(c, np.arange(90, dtype=np.int32)) for c in (0, 2, 3)]
    evaluator = made.evaluator(data.columns, members, 4, personal=True)
    evaluator(state)
    return evaluator


def assert_same(a, b):
    assert a.clients == b.clients
    for name, pair in a.sums.items():
        for x, y in zip(pair, b.sums[name], strict=True):
            assert_close(x, y, rtol=1e-6)
    for x, y in zip(a.examples, b.examples, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("examples", "each"), [(90, 1), (61, 10), (7, 1)])
def test_fewer_examples_need_no_program_of_their_own(federation, test_set, examples, each):
    made, state = federation
    data = toy.dataset(examples, seed=2)
    rows = np.array_split(np.arange(examples, dtype=np.int32), max(examples // each, 3))
    members = [(i % 5, own) for i, own in enumerate(rows)]
    shared = made.evaluator(data.columns, members, 4, personal=True, template=test_set)
    assert shared.known(state)
    found = shared(state)
    assert shared.compile_seconds == 0
    if examples != 90:
        assert_same(found, made.evaluator(data.columns, members, 4, personal=True)(state))


@pytest.mark.parametrize(
    "columns",
    [
        toy.dataset(91, seed=2).columns,
        {**toy.dataset(20).columns, "more": np.zeros(20, np.float32)},
        {**toy.dataset(20).columns, "labels": np.zeros(20, np.int16)},
        {**toy.dataset(20).columns, "x": np.zeros((20, toy.FEATURES + 1), np.float32)},
    ],
    ids=["more rows", "more columns", "another dtype", "another shape"],
)
def test_other_shapes_have_their_own_program(federation, test_set, columns):
    made, state = federation
    members = [(0, np.arange(len(columns["x"]), dtype=np.int32))]
    own = made.evaluator(columns, members, 4, personal=True, template=test_set)
    assert not own.known(state)


@pytest.mark.slow
def test_texts_take_the_padded_lengths_of_the_others():
    rng = np.random.default_rng(0)

    def texts(lengths):
        mask = np.arange(32)[None] < np.asarray(lengths)[:, None]
        ids = np.where(mask, rng.integers(5, 60, mask.shape), 0).astype(np.int32)
        columns = {"input_ids": ids, "attention_mask": mask}
        return Dataset(
            columns | {"labels": np.arange(len(ids), dtype=np.int32) % 2}, ("class 0", "class 1")
        )

    data = texts([8] * 4)
    clients = Clients(data, (np.arange(4, dtype=np.int32),))
    inputs = (toy.text_model(), fp.algorithms.fedavg(optax.sgd(0.1)), clients)
    made = session(*inputs, placement=Placement(lanes=1))
    state = made.init(0)

    def evaluator(data, template=None):
        members = made.global_members(len(data))
        return made.evaluator(data.columns, members, 4, personal=False, template=template)

    long = evaluator(texts([7] * 20 + [19] * 12))
    long(state)
    short = texts([5, 11, 3, 12, 9, 9])
    shared, own = evaluator(short, template=long), evaluator(short)
    assert shared.known(state)
    assert not own.known(state)
    assert_same(shared(state), own(state))
    assert not evaluator(texts([25]), template=long).known(state), "too long for the padded lengths"
