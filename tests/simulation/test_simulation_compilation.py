"""Programs are compiled once, within a process and across processes."""

import gc
import weakref

import jax
import optax
import pytest
import running
import toy
from compiled import compilations

import fedjax_peft as fp
from fedjax_peft import tasks
from fedjax_peft.algorithms import ditto, fedavg
from fedjax_peft.engine.compilation import programs

pytestmark = pytest.mark.slow

SIZES = [7, 4, 12, 1, 9, 16, 3, 5]


@pytest.fixture(scope="module")
def model():
    return toy.model()


@pytest.fixture(scope="module")
def algorithm():
    return fedavg(optax.sgd(0.1))


def run(model, algorithm, *, seed=0, rounds=3, partition=0, **options):
    data = {
        "clients": toy.clients(SIZES, seed=partition),
        "test": toy.dataset(70, seed=3 + partition),
    }
    options = {"clients_per_round": 3, "eval_batch_size": 4, "model": model, **data, **options}
    return running.run(algorithm, rounds=rounds, seed=seed, **options)


def test_another_seed_or_data_or_more_rounds_compile_no_program(model, algorithm):
    first = run(model, algorithm)
    compilations.clear()
    again = run(model, algorithm)
    assert not compilations
    others = [
        run(model, algorithm, seed=1),
        run(model, algorithm, rounds=12),
        run(model, algorithm, partition=1),
    ]
    assert not compilations
    without = [{**row, "time": 0} for row in first.metrics]
    assert [{**row, "time": 0} for row in again.metrics] == without
    assert all(o.metrics[3]["train_loss"] != without[3]["train_loss"] for o in others[::2])
    assert "compile_s" not in again.metrics[1]["time"]
    compilations.clear()
    run(model, algorithm, batch_size=2)
    assert compilations, "another shape is another program"


def test_wrapped_algorithms_share_their_program(model, algorithm):
    options = {
        "privacy": fp.privacy.central(clip=0.1, noise_multiplier=1.0),
        "attack": fp.attacks.sign_flip(0.2),
        "transforms": [fp.transforms.quantize(bits=8)],
    }
    one = run(model, algorithm, **options)
    compilations.clear()
    assert run(model, algorithm, seed=1, **options).metrics[-1] != one.metrics[-1]
    assert not compilations
    run(model, algorithm, **options | {"attack": fp.attacks.sign_flip(0.4)})
    assert compilations, "another attack is another program"


def test_the_clients_own_models_and_diagnostics_are_reused_too(model):
    algorithm = ditto(optax.sgd(0.1))
    options = {"diagnostics": ["clients", "variation"], "client_test": toy.clients(SIZES, seed=5)}
    run(model, algorithm, **options)
    compilations.clear()
    run(model, algorithm, seed=1, **options)
    assert not compilations


def test_validation_uses_the_programs_of_the_test(algorithm):
    for own, count in ((algorithm, 3), (ditto(optax.sgd(0.1)), 4)):
        model = toy.model()
        run(model, own, client_test=toy.clients([4] * len(SIZES), seed=5))
        assert len(programs.of(model.apply)) == count, "training and each evaluation"
        more = {"client_validation": toy.clients([3] * len(SIZES), seed=6)}
        more |= {"validation": toy.dataset(50, seed=8)}
        run(model, own, client_test=toy.clients([4] * len(SIZES), seed=5), **more)
        assert len(programs.of(model.apply)) == count


def test_another_algorithm_or_setting_is_another_program(model, algorithm):
    one = run(model, algorithm).metrics[-1]["test_loss"]
    other = run(model, fedavg(optax.sgd(0.2))).metrics[-1]["test_loss"]
    with jax.default_matmul_precision("bfloat16"):
        run(model, algorithm)
    assert one != other
    assert run(model, algorithm).metrics[-1]["test_loss"] == one
    assert len(programs.of(model.apply)) >= 6


def test_programs_are_freed_with_their_model_and_bounded_in_number(monkeypatch):
    monkeypatch.setattr(programs, "bound", 3)
    model = toy.model()
    frozen = weakref.ref(model.frozen["layer.kernel"])
    for rate in (0.1, 0.2):
        run(model, fedavg(optax.sgd(rate)))
    kept = programs.of(model.apply)
    assert len(kept) == 3
    gone = weakref.ref(kept[0])
    del model, kept
    gc.collect()
    assert gone() is None
    assert frozen() is None


@pytest.mark.parametrize("name", tasks.__all__)
def test_a_task_is_the_same_every_time(name):
    """Otherwise its compiled programs would not be found."""
    make = getattr(tasks, name)
    assert make() == make()
