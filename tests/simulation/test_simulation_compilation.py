"""Programs are compiled once, within a process and across processes."""

import gc
import weakref

import jax
import optax
import pytest
import running
import toy
from compiled import compilations
from internals import programs

import fedjax_peft as fp
from fedjax_peft import tasks

pytestmark = pytest.mark.slow

SIZES = [7, 4, 12, 1, 9, 16, 3, 5]


@pytest.fixture(scope="module")
def model():
    return toy.model()


PERSONAL = fp.algorithms.fedavg(optax.sgd(0.1), head="private")
OPTIONS = {
    "privacy": fp.privacy.central(clip=0.1, noise_multiplier=1.0),
    "attack": fp.attacks.sign_flip(0.2),
    "transforms": [fp.transforms.quantize(bits=8)],
    "diagnostics": ["variation"],
    "client_test": toy.clients(SIZES, seed=5),
}


def run(model, algorithm=PERSONAL, *, seed=0, rounds=3, partition=0, **options):
    data = {
        "clients": toy.clients(SIZES, seed=partition),
        "test": toy.dataset(70, seed=3 + partition),
    }
    options = {"clients_per_round": 3, "eval_batch_size": 4, "model": model, **data, **options}
    return running.run(algorithm, rounds=rounds, seed=seed, **options)


def test_another_seed_or_data_or_more_rounds_compile_no_program(model):
    """With clients' own models and measurements, under privacy, an attack and a transform."""

    def stop(phase):
        if phase.details.get("program") == "round":
            raise KeyboardInterrupt

    first = run(model, **OPTIONS)
    compilations.clear()
    again = run(model, **OPTIONS, on_phase=stop)
    others = [run(model, **OPTIONS, **x) for x in ({"seed": 1}, {"rounds": 12}, {"partition": 1})]
    assert not compilations
    assert running.rows(again) == running.rows(first)
    losses = [one.metrics[3]["train_loss"] for one in (first, *others)]
    assert losses[0] == losses[2]
    assert len({*losses}) == 3
    assert "compile_s" not in again.metrics[1]["time"]
    with pytest.raises(KeyboardInterrupt):  # another attack is another program
        run(model, **OPTIONS | {"attack": fp.attacks.sign_flip(0.4)}, on_phase=stop)


def test_the_same_transforms_share_a_program(model):
    """Although what joins them is a new object in each run."""
    given = [fp.transforms.clip_norm(0.5), fp.transforms.quantize(bits=8)]
    run(model, rounds=1, transforms=given)
    compilations.clear()
    run(model, rounds=1, transforms=given)
    assert not compilations
    run(model, rounds=1, transforms=given[:1])
    assert compilations, "other transforms are another program"


def test_validation_uses_the_programs_of_the_test():
    model, own = toy.model(), {"client_test": toy.clients([4] * len(SIZES), seed=5)}
    run(model, running.FEDAVG, **own)
    assert len(programs.of(model.apply)) == 3, "training and each evaluation"
    more = {"client_validation": toy.clients([3] * len(SIZES), seed=6)}
    run(model, running.FEDAVG, **own, **more, validation=toy.dataset(50, seed=8))
    assert len(programs.of(model.apply)) == 3


def test_programs_are_freed_with_their_model_and_bounded_in_number(monkeypatch):
    """Another algorithm is another program, and so is another precision."""
    monkeypatch.setattr(programs, "bound", 3)
    model = toy.model()
    frozen, losses = weakref.ref(model.frozen["layer.kernel"]), []
    for rate, precision in ((0.1, None), (0.2, None), (0.2, "bfloat16")):
        compilations.clear()
        with jax.default_matmul_precision(precision):
            losses.append(
                run(model, fp.algorithms.fedavg(optax.sgd(rate)), rounds=1).metrics[-1]["test_loss"]
            )
        assert compilations
    kept = programs.of(model.apply)
    gone = weakref.ref(kept[0])
    assert losses[0] != losses[1]
    assert len(kept) == 3
    del model, kept
    gc.collect()
    assert gone() is None
    assert frozen() is None


@pytest.mark.parametrize("name", tasks.__all__)
def test_a_task_is_the_same_every_time(name):
    """Otherwise its compiled programs would not be found."""
    make = getattr(tasks, name)
    assert make() == make()
