"""Examples that stay on the host: the same rounds, with few examples on the device."""

import jax
import numpy as np
import optax
import pytest
import running
import toy
from closeness import assert_trees_close
from options import session_options
from refusals import refused
from running import FEDAVG, model, rows

import fedjax_peft as fp
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.streaming import of_plan

pytestmark = pytest.mark.slow


def plan_of(examples):
    """A plan that reads these examples."""
    arrays = {name: np.zeros(1) for name in Plan._fields}
    return Plan(**{**arrays, "examples": np.array(examples, np.int32)})


def test_examples_of_a_plan():
    """The plan's batches are the same examples as before, in smaller columns."""
    x = np.arange(100) * 10
    columns, plan = of_plan({"x": x}, plan_of([[[70, 3, -1], [3, 99, 70]]]))
    np.testing.assert_array_equal(plan.examples, [[[1, 0, -1], [0, 2, 1]]])
    np.testing.assert_array_equal(columns["x"], [30, 700, 990, 0, 0, 0])


def test_no_more_rows_than_there_are():
    columns, plan = of_plan({"x": np.arange(2)}, plan_of([[[1, 0, 1, -1]]]))
    np.testing.assert_array_equal(columns["x"], [0, 1])
    np.testing.assert_array_equal(plan.examples, [[[1, 0, 1, -1]]])


def clients(tmp_path=None):
    """Twelve clients with five examples each; in memory-mapped files if there is a directory."""
    made = toy.clients([5] * 12)
    if tmp_path is None:
        return made
    columns = {}
    for name, x in made.data.columns.items():
        np.save(tmp_path / f"{name}.npy", x)
        columns[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    return fp.Clients(fp.Dataset(columns, made.data.label_names), made.indices)


DITTO, MODEL = fp.algorithms.ditto(optax.sgd(0.1)), toy.model(dropout=0)


def run(data, examples, *, algorithm=DITTO, **options):
    settings = {"rounds": 4, "clients_per_round": 3, "batch_size": 4, "eval_every": 2}
    settings |= {"test": toy.dataset(16, seed=7), "test_clients": 4, "examples": examples}
    settings |= {"model": MODEL, "lanes": 1}
    return running.run(algorithm, clients=data, **settings | options)


def numbers(result):
    return rows(result, "headline", "headline_better", "lower_is_better", "by_class")


TOP_K = fp.transforms.top_k(0.3, error_feedback=True)


@pytest.mark.parametrize(
    "options",
    [
        {"client_state": "disk", "transforms": TOP_K, "diagnostics": ["local"]},
        {"algorithm": fp.algorithms.fedrep(optax.sgd(0.1), tune_epochs=1)},
        {},
    ],
    ids="-".join,
)
@pytest.mark.sample("client_state-transforms-diagnostics")
def test_same_run_with_examples_in_files(options, tmp_path):
    """The files are memory-mapped columns, which the device never has whole."""
    usual, mapped = run(clients(), "device", **options), run(clients(tmp_path), "host", **options)
    assert_trees_close(numbers(mapped), numbers(usual))
    for client in (0, 5):
        assert_trees_close(mapped.client_params(client), usual.client_params(client))


def test_device_has_the_examples_of_a_round_only():
    """The compiled program takes as many rows as a plan can read, and compiles once."""
    data, sizes = toy.clients([5] * 200), {}
    for examples in ("device", "host"):
        session = fp.session(
            *(MODEL, FEDAVG, data),
            **session_options(**{"clients_per_round": 2, "batch_size": 4, "examples": examples}),
        )
        state = session.init()
        for _ in range(3):
            state, _ = session.step(state)
        assert len(session._programs) == 1
        (program,) = session._programs.values()
        program = getattr(program, "_program", program)
        sizes[examples] = {len(x) for x in program._inputs[-1].values()}
        assert all(isinstance(x, jax.Array) for x in program._inputs[-1].values())
    plan = session.plan(1)
    assert sizes == {"device": {1000}, "host": {plan.examples.size}}
    assert plan.examples.size < 100


def test_wrong_place_and_runs_side_by_side():
    refused(r"examples = 'hots' is unknown.*host", run, clients(), "hots")
    with pytest.raises(fp.InputError, match=r"Runs side by side share examples.*--replicas 1"):
        fp.sweep(
            model(),
            lambda p: fp.algorithms.fedavg(optax.sgd(p["learning_rate"])),
            clients(),
            points=fp.grid(learning_rate=[0.1, 0.2]),
            replicas=2,
            rounds=1,
            placement=fp.Placement(examples="host"),
        )
