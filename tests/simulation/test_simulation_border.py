"""Arguments of the wrong type raise an error that shows the right call."""

import jax
import numpy as np
import optax
import pytest
import toy
from flax import nnx
from options import run_options

import fedjax_peft as fp
from fedjax_peft import InputError, simulate
from fedjax_peft.algorithms import fedavg
from fedjax_peft.simulation.checks import check_method

CLIENTS = toy.clients([4, 4])


def run(model=None, algorithm=None, clients=CLIENTS, **options):
    algorithm = algorithm or fedavg(optax.sgd(0.1))
    return simulate(model or toy.model(), algorithm, clients, rounds=1, **run_options(**options))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"algorithm": "fedavg"}, r"'algorithm' is 'fedavg'.*fp\.algorithms\.fedavg\(optax"),
        ({"algorithm": "fedavgg"}, "Did you mean 'fedavg'"),
        ({"algorithm": fedavg}, r"Call it: fedavg\(optax"),
        ({"algorithm": 3}, "of the type int, and must be a fp.contracts.Algorithm"),
        ({"clients": toy.dataset(8)}, r"'clients' is of the type Dataset.*fp\.partition\.iid"),
        ({"clients": {"train": toy.dataset(8)}}, "'clients' is of the type dict"),
        ({"client_test": toy.dataset(8)}, "'client_test' is of the type Dataset"),
        ({"test": {"test": toy.dataset(8)}}, r"'test' is of the type dict.*data\['test'\]"),
        ({"test": CLIENTS}, "'test' is of the type Clients"),
        ({"task": "classification"}, "'task' is 'classification'.*fp.tasks"),
        ({"stop": 0.8}, r"'stop' is of the type float.*fp\.early_stop"),
        ({"model": "minilm-l6"}, r"'model' is 'minilm-l6'.*fp\.load_model\('minilm-l6'"),
        ({"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}, r"type Linear.*fp\.bind\(module"),
    ],
)
def test_another_kind_of_thing_is_refused(options, complaint, tmp_path):
    with pytest.raises(InputError, match=complaint):
        run(out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [*fp.algorithms.__all__, "fedopt"])
def test_every_algorithm_checks_its_optimizer(name):
    make = getattr(fp.algorithms, name)
    more = {"server": optax.sgd(1.0)} if name == "fedopt" else {}
    for value, advice in (
        (0.1, r"optax\.adamw\(0\.1\)"),
        ("adamw", r"optax\.adamw\(1e-3\)"),
        (optax.adamw, r"Call it: adamw\(1e-3\)"),
        (None, "such as optax"),
    ):
        with pytest.raises(InputError, match=f"'optimizer' of '{name}' is .*{advice}"):
            make(value, **more)


@pytest.mark.parametrize(
    ("value", "advice"),
    [("fra", r"fp\.aggregators\.fra\(\)"), (fp.aggregators.fra, r"Call it: fra\(\)"), (3, "mean")],
)
def test_objects_that_are_not_aggregators_are_errors(value, advice):
    with pytest.raises(InputError, match=f"'aggregator' of 'fedavg' is .*{advice}"):
        fedavg(optax.sgd(0.1), aggregator=value)
    with pytest.raises(TypeError, match="fedavg"):
        fedavg(optax.sgd(0.1), no_such_option=1)


def test_a_model_without_adapters_is_warned_of():
    model, algorithm = fp.testing.tiny_model(), fedavg(optax.sgd(0.1))
    with pytest.warns(UserWarning, match=r"0 adapter parameters: only its head, of 1,188 .*lora"):
        check_method(model, algorithm, 2, None, ())
    # Who attached a method has said what is trained.
    check_method(fp.attach(model, fp.peft.head_only()), algorithm, 2, None, ())
    check_method(fp.attach(model, fp.lora(rank=1)), algorithm, 2, None, ())
    with pytest.raises(InputError, match=r"no parameters to train.*fp\.attach"):
        check_method(model.replace(trainable={}, kinds={}), algorithm, 2, None, ())


class Own(nnx.Module):
    """A user's module, whose output is plain logits, or something else."""

    def __init__(self, returns):
        rngs = nnx.Rngs(0)
        self.body = nnx.Linear(toy.FEATURES, 8, rngs=rngs)
        self.classifier = nnx.Linear(8, toy.CLASSES, rngs=rngs)
        self.returns = returns

    def __call__(self, batch):
        return self.returns(self.classifier(jax.nn.relu(self.body(batch["x"]))))


def own(returns):
    return fp.attach(fp.bind(Own(returns), head=("classifier",)), fp.lora(rank=2, targets=["body"]))


def test_plain_logits_are_accepted():
    result = run(own(lambda logits: logits), test=toy.dataset(8, seed=2))
    assert np.isfinite(result.metrics[-1]["test_loss"])
    with pytest.raises(InputError, match=r"logits only.*Outputs\(logits, hidden\)"):
        run(own(lambda logits: logits), fp.algorithms.moon(optax.sgd(0.1)))


@pytest.mark.parametrize(
    ("returns", "complaint"),
    [
        (lambda logits: {"logits": logits}, "type dict"),
        (lambda logits: (logits, logits), "type tuple"),
        (lambda logits: logits[:, 0], r"of shape \(\d+,\)"),
    ],
)
def test_other_outputs_are_refused(returns, complaint):
    with pytest.raises(InputError, match=f"The model returned .*{complaint}.*forward"):
        run(own(returns))
