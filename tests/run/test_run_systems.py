"""Published systems: each resolves, can be built, and gives way to what a config says."""

import pytest

from fedjax_peft.errors import InputError
from fedjax_peft.run import config as configs

REST = {
    "rounds": 1,
    "clients_per_round": 2,
    "model": {"name": "tiny"},
    "data": {"name": "here"},
    "partition": {"name": "iid", "clients": 4},
    "optimizer": {"learning_rate": 0.1},
}


@pytest.mark.parametrize("name", configs.systems())
def test_every_system_is_complete(name):
    system = configs.systems()[name]
    rest = {key: value for key, value in REST.items() if key != "clients_per_round"}
    config = configs.resolve({**rest, "system": name})
    for table in configs.NAMESPACES:
        if table in system:
            assert config[table]["name"] == system[table].get("name", config[table]["name"])
    assert configs.resolve(config) == config, "what a run records runs again"
    assert configs.build_algorithm(config).name
    assert configs.build_method(config).name == system["peft"]["name"]
    assert len(system["about"]) < 90


def test_what_a_config_says_goes_before_the_system():
    config = configs.resolve({**REST, "system": "federa", "peft": {"rank": 4}})
    assert (config["peft"]["rank"], config["peft"]["init"]) == (4, "svd")
    assert config["optimizer"]["learning_rate"] == 0.1
    assert config["batch_size"] == 16


def test_another_function_does_not_get_the_systems_options():
    config = configs.resolve({**REST, "system": "federa", "peft": {"name": "opendelta"}})
    assert config["peft"]["name"] == "opendelta"
    assert "init" in config["peft"]
    assert config["peft"]["init"] != "svd"


def test_an_unknown_system_is_named_with_the_nearest():
    with pytest.raises(InputError, match=r"no system 'fedrea'.*'federa'"):
        configs.resolve({**REST, "system": "fedrea"})
