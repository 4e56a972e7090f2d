"""Examples that stay on the host: the same rounds to the bit, with few examples on the device."""

import jax
import numpy as np
import optax
import pytest
import toy

import fedjax_peft as fp
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.streaming import of_plan
from fedjax_peft.errors import InputError


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


def run(data, examples, **options):
    algorithm = options.pop("algorithm", fp.algorithms.ditto(optax.sgd(0.1)))
    settings = {"rounds": 4, "clients_per_round": 3, "batch_size": 4, "eval_every": 2}
    test = toy.dataset(16, seed=7)
    return fp.simulate(
        *(toy.model(), algorithm, data),
        **{**settings, "test": test, "test_clients": 4, "examples": examples, **options},
    )


def numbers(result):
    return [{n: x for n, x in row.items() if n != "time"} for row in result.metrics]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"client_state": "disk", "transforms": fp.transforms.top_k(0.3, error_feedback=True)},
        {"algorithm": fp.algorithms.fedrep(optax.sgd(0.1), tune_epochs=1)},
        {"asynchronous": fp.asynchronous.fedbuff(2), "time_model": fp.TimeModel(spread=1.0)},
        {"diagnostics": ["local"]},
        {"engine": "reference"},
    ],
    ids=["ditto", "disk", "tuning", "asynchronous", "local", "reference"],
)
def test_same_run_to_the_bit(options, tmp_path):
    """Also from memory-mapped files, whose columns the device never has whole."""
    usual, mapped = run(clients(), "device", **options), run(clients(tmp_path), "host", **options)
    assert numbers(mapped) == numbers(usual)
    for name, leaf in usual.client_params(5).items():
        np.testing.assert_array_equal(mapped.client_params(5)[name], leaf)


def test_device_has_the_examples_of_a_round_only():
    """The compiled program takes as many rows as a plan can read, and compiles once."""
    data, sizes = toy.clients([5] * 200), {}
    for examples in ("device", "host"):
        session = fp.session(
            *(toy.model(), fp.algorithms.fedavg(optax.sgd(0.1)), data),
            **{"clients_per_round": 2, "batch_size": 4, "examples": examples},
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
    with pytest.raises(InputError, match=r"examples = 'hots' is unknown.*host"):
        run(clients(), "hots")
    with pytest.raises(InputError, match="Runs side by side share examples"):
        fp.sweep(
            lambda p: fp.algorithms.fedavg(optax.sgd(p["learning_rate"])),
            toy.model(),
            clients(),
            points=fp.grid(learning_rate=[0.1, 0.2]),
            replicas=2,
            rounds=1,
            examples="host",
        )
