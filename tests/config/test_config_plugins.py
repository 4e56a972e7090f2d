"""Functions of a user in a config, by module or file name; errors name the cause."""

import pytest
import tomli_w
from internals import config as configs
from refusals import refused
from small_config import small

import fedjax_peft as fp

OWN = '''
"""My functions."""
from fedjax_peft import aggregators, algorithms
import beside

def median(trim=0.1, times=2):
    """In truth a mean."""
    return aggregators.mean(error=False)._replace(name=f"median {trim} {times} {beside.WORD}")

def plain(optimizer):
    return algorithms.fedavg(optimizer)

def my_fedavg(optimizer, aggregator=None, mu=0.5):
    return algorithms.fedavg(optimizer, aggregator=aggregator)._replace(name=f"my_fedavg {mu}")

def halves(data, clients: int, seed: int = 0):
    return None

NUMBER = 1
'''
CONFIG = small(
    algorithm={"name": "my_functions:my_fedavg", "mu": 0.25},
    partition={"name": "my_functions:halves", "clients": 3},
    aggregator={"name": "my_functions.py:median", "trim": 0.2},
    stop={"target": 0.9, "patience": 3},
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a config and its module, which is not the working directory."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "my_functions.py").write_text(OWN)
    (tmp_path / "configs" / "beside.py").write_text("WORD = 'here'")
    (tmp_path / "configs" / "own.toml").write_text(tomli_w.dumps(CONFIG))
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere")
    (tmp_path / "wrong.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "configs"


@pytest.mark.parametrize("name", ["flora", "my_functions.py:plain"])
def test_an_aggregator_that_the_algorithm_does_not_take_is_refused(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    raw = {**CONFIG, "partition": {"name": "iid", "clients": 3}, "aggregator": {"name": "fra"}}
    with pytest.raises(
        fp.InputError, match=r"\[aggregator\] chooses 'fra', and '.*' takes no aggr"
    ):
        configs.resolve({**raw, "algorithm": {"name": name}})


def test_functions_of_a_module_in_the_configs_folder(folder):
    config = configs.resolve(configs.load(folder / "own.toml"))
    algorithm = configs.build_algorithm(config)
    assert algorithm.name == "my_fedavg 0.25"
    assert algorithm.aggregator.name == "median 0.2 2 here"
    assert config["partition"] == {
        "name": f"{folder}/my_functions.py:halves",
        "clients": 3,
        "seed": None,
    }
    # The path is absolute, so that the run's directory is independent of the working directory.
    assert configs.resolve(config) == config
    assert config["stop"]["target"] == 0.9
    assert config["stop"]["patience"] == 3


def test_functions_of_a_module_that_python_can_import(folder):
    config = configs.load(folder / "own.toml")
    config["aggregator"] = {"name": "fedjax_peft.aggregators:mean"}
    assert configs.build_algorithm(configs.resolve(config)).aggregator.name == "mean"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nowhere:median", "the module 'nowhere', which does not exist: it is not a file"),
        ("configs/nowhere.py:median", "'configs/nowhere.py', which does not exist"),
        ("my_functions:mediam", "has no function 'mediam'. Did you mean 'median'"),
        ("my_functions:NUMBER", "has no function 'NUMBER'"),
        ("my_functions:", "does not have the form module:function"),
        ("broken:f", "cannot be imported: ModuleNotFoundError: .*no_such_module_anywhere"),
        ("wrong:f", "cannot be imported: SyntaxError: .*line 1"),
    ],
)
def test_errors_name_the_missing_module_or_function(folder, name, complaint):
    raw = configs.load(folder / "own.toml")
    located = f"{folder}/my_functions.py" if name.startswith("my_") else ""
    raw["aggregator"] = {"name": name.replace("my_functions", located) if located else name}
    refused(complaint, configs.resolve, raw)


def test_arguments_of_user_functions_are_checked(folder):
    raw = configs.load(folder / "own.toml")
    for key, value, complaint in (
        ("trm", 0.1, "Did you mean 'trim'"),
        ("trim", "much", r"\[aggregator\] 'trim' cannot be 'much'"),
    ):
        wrong = {**raw, "aggregator": {**raw["aggregator"], key: value}}
        refused(complaint, configs.resolve, wrong)
    with pytest.raises(fp.InputError, match=r"\[stop\] 'targett'.*Did you mean 'target'"):
        configs.resolve({**raw, "stop": {"targett": 1}})
    refused("patience = 0 must be", configs.resolve, {**raw, "stop": {"patience": 0}})


def test_a_head_is_named_by_its_kind_or_by_a_task(folder):
    raw = configs.load(folder / "own.toml")

    def head(name):
        return configs.resolve({**raw, "model": {"name": "x", "head": name}})["model"]["head"]

    assert head("token_classification") == head("tagging") == "token_classification"
    assert head("span_classification") == head("question_answering") == "span_classification"
    assert head("two_classifiers") == "two_classifiers"
    refused(r"'head' cannot be 'token_clasification'. Did you mean", head, "token_clasification")


def test_a_task_of_ones_own_must_be_a_task(folder):
    raw = configs.load(folder / "own.toml")
    config = configs.resolve({**raw, "task": "fedjax_peft.aggregators:mean"})
    refused(r"returns Aggregator, not a fedjax_peft\.tasks\.Task", configs.task_of, config)
    builtin = configs.resolve({**raw, "task": {"name": "question_answering", "n_best": 5}})
    assert builtin["task"]["max_answer_length"] == 30
    assert configs.task_of(builtin).head == "span_classification"
    refused("There is no task 'taging'", configs.resolve, {**raw, "task": "taging"})
