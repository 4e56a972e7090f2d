"""Functions of the user's own in a config, by the name of their module; errors that say why."""

import pytest

from fedjax_peft.config import config as configs
from fedjax_peft.errors import InputError

OWN = '''
"""My functions."""
from fedjax_peft import aggregators, algorithms
import beside

def median(trim=0.1, times=2):
    """A mean, in truth."""
    return aggregators.mean(error=False)._replace(name=f"median {trim} {times} {beside.WORD}")

def mine(optimizer, aggregator=None, mu=0.5):
    return algorithms.fedavg(optimizer, aggregator=aggregator)._replace(name=f"mine {mu}")

def halves(data, clients: int, seed: int = 0):
    return None

NUMBER = 1
'''
CONFIG = """
rounds = 2
algorithm = {name="my_functions:mine", mu=0.25}
[model]
name = "x"
[data]
name = "y"
[partition]
name = "my_functions:halves"
clients = 3
[aggregator]
name = "my_functions.py:median"
trim = 0.2
[optimizer]
learning_rate = 0.1
[stop]
target = 0.9
patience = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns a folder with a config and its module; the working directory is another one."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "my_functions.py").write_text(OWN)
    (tmp_path / "configs" / "beside.py").write_text("WORD = 'here'")
    (tmp_path / "configs" / "own.toml").write_text(CONFIG)
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere")
    (tmp_path / "wrong.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "configs"


def test_a_config_names_functions_of_its_folder(folder):
    config = configs.resolve(configs.load(folder / "own.toml"))
    algorithm = configs.build_algorithm(config)
    assert algorithm.name == "mine 0.25"
    assert algorithm.aggregator.name == "median 0.2 2 here"
    assert config["partition"] == {
        "name": f"{folder}/my_functions.py:halves",
        "clients": 3,
        "seed": None,
    }
    # As the run's directory holds it, it is found from everywhere.
    assert configs.resolve(config) == config
    assert config["stop"]["target"] == 0.9
    assert config["stop"]["patience"] == 3


def test_a_name_may_be_of_what_python_imports(folder):
    config = configs.load(folder / "own.toml")
    config["aggregator"] = {"name": "fedjax_peft.aggregators:mean"}
    assert configs.build_algorithm(configs.resolve(config)).aggregator.name == "mean"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nowhere:median", "the module 'nowhere', which there is not: neither as a file"),
        ("configs/nowhere.py:median", "'configs/nowhere.py', which there is not"),
        ("my_functions:mediam", "has no function 'mediam'. Did you mean 'median'"),
        ("my_functions:NUMBER", "has no function 'NUMBER'"),
        ("my_functions:", "not of the form module:function"),
        ("broken:f", "cannot be imported: ModuleNotFoundError: .*no_such_module_anywhere"),
        ("wrong:f", "cannot be imported: SyntaxError: .*line 1"),
    ],
)
def test_what_is_missing_is_named(folder, name, complaint):
    raw = configs.load(folder / "own.toml")
    located = f"{folder}/my_functions.py" if name.startswith("my_") else ""
    raw["aggregator"] = {"name": name.replace("my_functions", located) if located else name}
    with pytest.raises(InputError, match=complaint):
        configs.resolve(raw)


def test_arguments_of_own_functions_are_checked(folder):
    raw = configs.load(folder / "own.toml")
    for key, value, complaint in (
        ("trm", 0.1, "Did you mean 'trim'"),
        ("trim", "much", r"\[aggregator\] 'trim' cannot be 'much'"),
    ):
        wrong = {**raw, "aggregator": {**raw["aggregator"], key: value}}
        with pytest.raises(InputError, match=complaint):
            configs.resolve(wrong)
    with pytest.raises(InputError, match=r"\[stop\] 'targett'.*Did you mean 'target'"):
        configs.resolve({**raw, "stop": {"targett": 1}})
    with pytest.raises(InputError, match="patience = 0 must be"):
        configs.resolve({**raw, "stop": {"patience": 0}})
