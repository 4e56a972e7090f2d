"""Wrong arguments raise an error that shows the right call, before any file is written."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import running
import toy
from flax import nnx
from internals import Question, check_method
from refusals import refused

import fedjax_peft as fp
from fedjax_peft import Clients, Dataset, InputError, TimeModel
from fedjax_peft.simulation.checks import check_trusted

CLIENTS, TEST = toy.clients((9, 4, 0, 1, 13, 5, 6, 2)), toy.dataset(20, seed=5)
NOTHING, SOME = (np.arange(0),) * 8, (np.arange(2),) * 8
FEW = np.array([1.0, 1, 0, 0, 0, 0, 0, 0])
"""Weights of eight clients."""
LABELS = ("class 0", "class 1", "class 2", "class 3")
UNLABELLED = Dataset({"x": np.zeros((2, 5), np.float32)})
FOUR = Dataset({"x": np.zeros((2, 5), np.float32), "labels": np.array([0, 3])}, LABELS)
MASKED = Dataset({**TEST.columns, "mask": np.ones(20)}, LABELS)
NAMELESS = dataclasses.replace(toy.model(), labels=())
QUESTIONS = (Question("q0", "a b", ("a",)), Question("q1", "a b", ()))
UNANSWERED = Dataset({"x": np.zeros(2)}, task="question_answering", references=QUESTIONS)


def run(model=None, algorithm=None, **options):
    algorithm = algorithm or running.FEDAVG
    return running.run(algorithm, model=model, **{"clients": CLIENTS, "rounds": 1, **options})


KINDS = [
    ({"algorithm": "fedavg"}, r"'algorithm' is 'fedavg'.*fp\.algorithms\.fedavg\(optax"),
    ({"algorithm": "fedavgg"}, "Did you mean 'fedavg'"),
    ({"algorithm": fp.algorithms.fedavg}, r"Call it: fedavg\(optax"),
    ({"algorithm": 3}, "of the type int, and must be a fp.contracts.Algorithm"),
    ({"clients": toy.dataset(8)}, r"'clients' is of the type Dataset.*fp\.partition\.iid"),
    ({"clients": {"train": toy.dataset(8)}}, "'clients' is of the type dict"),
    ({"client_test": toy.dataset(8)}, "'client_test' is of the type Dataset"),
    ({"client_validation": TEST}, "'client_validation' is of the type Dataset"),
    ({"test": {"test": toy.dataset(8)}}, r"'test' is of the type dict.*data\['test'\]"),
    ({"validation": CLIENTS}, r"'validation' is of the type Clients, .*=data\['validation'\]"),
    ({"task": "classification"}, "'task' is 'classification'.*fp.tasks"),
    ({"measures": TEST.take}, r"'measures' is of the type method.*measures=\[\.\.\.\]"),
    ({"measures": [3]}, "A measure is a function of a moment, not 3"),
    ({"diagnostics": "clients"}, r"'diagnostics' is 'clients'.*diagnostics=\[\.\.\.\]"),
    ({"listeners": print}, r"'listeners' is of the type .*function.*listeners=\[\.\.\.\]"),
    ({"trackers": fp.trackers.csv()}, r"'trackers' is .*function.*trackers=\[\.\.\.\]"),
    ({"origin": "runs/mine"}, r"origin = 'runs/mine' must be a run.*fp\.load_run"),
    ({"stop": 0.8}, r"'stop' is of the type float.*fp\.early_stop"),
    ({"model": "minilm-l6"}, r"'model' is 'minilm-l6'.*fp\.load_model\('minilm-l6'"),
    ({"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}, r"type Linear.*fp\.bind\(module"),
]
NUMBERS = [
    ({"rounds": 0}, r"rounds = 0 must be a positive whole number"),
    ({"rounds": 10**9}, "rounds = 1000000000 is too large: at most 1,000,000"),
    ({"rounds": 10**5000}, "rounds = .*too long to write is too large"),
    ({"seed": -1}, r"seed = -1 must be"),
    ({"seed": 2**64}, "seed = .* is too large"),
    ({"batch_size": -1}, r"batch_size = -1 must be"),
    ({"epochs": 0}, r"epochs = 0 must be"),
    ({"epochs": (1, 2.5)}, r"epochs\[1\] = 2.5 must be a positive whole"),
    ({"epochs": 2**30}, "epochs = 1073741824 .* needs at least .* GB of memory"),
    ({"local_steps": 0}, r"local_steps = 0 must be"),
    ({"local_steps": "2-8"}, r"local_steps = '2-8' must be a positive whole number"),
    ({"local_steps": (0, 2)}, r"local_steps\[0\] = 0 must be a positive whole number"),
    ({"local_steps": (5, 2)}, r"least number is larger than its most. Write .* = \[2, 5\]"),
    ({"local_steps": [2, 3, 4]}, r"a pair of them: the least and the most"),
    ({"local_steps": 2**53}, "local_steps = 9007199254740992 is too large"),
    ({"local_steps": (1, 2**30)}, r"local_steps = \(1, 1073741824\) .* needs at least .* GB"),
    ({"lanes": 0}, r"lanes = 0 must be"),
    ({"devices": 99}, r"devices = 99, but there are \d"),
    ({"eval_every": 0}, r"evaluation.every = 0 must be"),
    ({"eval_batch_size": 0}, r"evaluation.batch_size = 0 must be"),
    ({"test_clients": 0}, r"test_clients = 0 must be"),
    ({"checkpoint_every": 0}, r"checkpoint_every = 0 must be"),
]
WHO_WORKS = [
    ({"sampling": "posson"}, r"no sampling 'posson'. Did you mean 'poisson'"),
    ({"batch_sampling": "posson"}, r"no batch_sampling 'posson'. Did you mean 'poisson'"),
    ({"sampling": "poisson"}, r"sampling = 'poisson' needs clients_per_round"),
    ({"sampling": "size"}, r"sampling = 'size' needs clients_per_round"),
    ({"sampling": "round_robin"}, r"sampling = 'round_robin' needs clients_per_round"),
    ({"sampling": "all", "clients_per_round": 3}, r"takes all 8 clients .* = 3: leave it out"),
    ({"sampling": "size", "clients_per_round": 8}, r"a weight, which are 7: .* = 8 is more"),
    (
        {"sampling": "size", "clients_per_round": 3, "clients": Clients(TEST, SOME, (), FEW)},
        r"a weight, which are 2: .* = 3 is more",
    ),
    ({"clients_per_round": 9}, r"clients_per_round = 9 is more than the 8 clients"),
    ({"clients_per_round": 0}, r"clients_per_round = 0 must be"),
    ({"failure_rate": -0.1}, r"failure_rate = -0\.1 must be a number from 0 to below 1"),
    ({"failure_rate": 1}, r"failure_rate = 1 must be"),
    ({"failure_rate": True}, r"failure_rate = True must be"),
    ({"deadline": 0}, r"deadline = 0 must be a positive number of seconds"),
    ({"deadline": float("nan")}, r"deadline = nan must be"),
    ({"deadline": 3, "time_model": TimeModel("measured")}, r"a number, not 'measured'"),
    ({"local_steps": 4, "stragglers": 0.5}, r"needs a range .* local_steps = \[1, 4\]"),
    ({"stragglers": 1.5}, r"stragglers = 1\.5 must be a number from 0 to 1"),
    ({"late": "partial"}, r"late = 'partial' needs a deadline"),
    ({"late": "partly", "deadline": 3.0}, r"late = 'partly' is unknown. Did you mean 'partial'"),
    ({"nonfinite": "ignore"}, r"nonfinite = 'ignore' is unknown"),
    ({"client_ranks": []}, "0 entries for 8 clients"),
    ({"client_ranks": [1] * 9}, "9 entries for 8 clients"),
    ({"client_ranks": [1, 3]}, "has 3"),
    ({"client_ranks": [1, 0]}, "has 0"),
    ({"client_ranks": 2}, "client_ranks = 2 must be a list of whole numbers"),
    ({"client_ranks": [1.0, 2.0]}, r"client_ranks = \[1\.0, 2\.0\] must be a list"),
]
DATA = [
    ({"test": UNLABELLED}, r"The test data are for classification, but have no column 'lab"),
    ({"test": UNANSWERED}, "test data have questions without an answer: 'q1'"),
    ({"test": FOUR}, r"has the class 'class 3', and the model has the classes 'class 0'"),
    ({"test": FOUR, "model": NAMELESS}, r"The test data have the label 3, but .* head has 3"),
    ({"test": MASKED}, "The test data have a column 'mask', which a batch has"),
    ({"clients": Clients(FOUR, SOME)}, "The training set '' has the class 'class 3'"),
    ({"client_test": Clients(FOUR, SOME)}, "The client_test set '' has the class 'class 3'"),
    ({"client_validation": Clients(TEST, SOME[:4])}, "client_validation is of 4 clients, .* are 8"),
    ({"client_validation": Clients(TEST, NOTHING)}, "client_validation gives no client an example"),
    ({"clients": Clients(TEST, NOTHING)}, r"No client has an example to train on"),
    ({"clients": Clients(TEST, SOME, (), 0 * FEW)}, "have the weight 0, so no update would ever"),
    ({"validation": TEST.take(np.arange(0))}, "The validation data have no examples"),
    ({"diagnostics": ["varation"]}, r"no diagnostic 'varation'.*'variation'"),
    ({"diagnostics": ["cka"]}, r"attach dual\(\)"),
    ({"diagnostics": ["second_classifier"]}, r"attach dual\(\)"),
    ({"diagnostics": ["local"]}, "needs a test set"),
]


@pytest.mark.parametrize(("options", "complaint"), [*KINDS, *NUMBERS, *WHO_WORKS, *DATA])
def test_wrong_arguments_are_refused_before_any_file_is_written(options, complaint, tmp_path):
    refused(complaint, run, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_model_without_adapters_is_warned_of():
    model, algorithm = fp.testing.tiny_model(), fp.algorithms.fedavg(optax.sgd(0.1))
    with pytest.warns(UserWarning, match=r"0 adapter parameters: only its head, of 1,188 .*lora"):
        check_method(model, algorithm, 2, None, ())
    # Who attached a method has said what is trained.
    check_method(fp.attach(model, fp.peft.head_only()), algorithm, 2, None, ())
    check_method(fp.attach(model, fp.lora(rank=1)), algorithm, 2, None, ())
    with pytest.raises(InputError, match=r"no parameters to train.*fp\.attach"):
        check_method(model.replace(trainable={}, kinds={}), algorithm, 2, None, ())


def test_a_trusted_client_must_exist_and_have_examples():
    for trusted, why in ((3, "does not exist"), (1, "has no examples or the weight 0")):
        algorithm = fp.algorithms.fedavg(optax.sgd(0.1), aggregator=fp.aggregators.fltrust(trusted))
        with pytest.raises(InputError, match=f"client {trusted}, which {why}.* such as 2"):
            check_trusted(algorithm, np.array([2, 0, 5]))
    check_trusted(algorithm._replace(aggregator=fp.aggregators.fltrust(2)), np.array([2, 0, 5]))


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
    refused(f"The model returned .*{complaint}.*forward", run, own(returns))
