"""``[asynchronous]`` and ``[availability]`` in a config."""

import pytest
from internals import config as configs
from refusals import refused
from small_config import small

from fedjax_peft import testing

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simple_encoder")]


@pytest.fixture
def resolved(tmp_path):
    """Returns a function that resolves a config of a tiny federation."""
    checkpoint = testing.write_tiny_checkpoint(tmp_path / "encoder")
    texts = testing.write_tiny_texts(tmp_path / "news", train=60, test=20)

    def make(**keys):
        tables = {"rounds": 3, "local_steps": 1, "clients_per_round": 3, "time": {"spread": 1.0}}
        tables |= {"evaluation": {"every": 5}, "placement": {"lanes": 1}, "peft": "head_only"}
        tables |= {"model": {"name": str(checkpoint)}, "partition": {"name": "iid", "clients": 6}}
        tables["data"] = {"name": "20newsgroups", "source": str(texts), "max_length": 8}
        return configs.resolve(small(**tables | keys))

    return make


def test_tables_name_the_server_and_the_availability(resolved, tmp_path):
    config = resolved(
        asynchronous={"name": "fedbuff", "buffer_size": 2},
        availability="diurnal",
        system={"failure_rate": 0.1},
    )
    assert config["asynchronous"]["exponent"] == 0.5
    assert "fedbuff server" in configs.describe(config)
    rows = configs.run(config, out=tmp_path / "run").metrics
    assert [len(row["clients"]) for row in rows[1:]] == [2, 2, 2]
    assert all("staleness_mean" in row for row in rows[1:])
    other = resolved(asynchronous={"name": "fedbuff", "buffer_size": 3})
    refused("another config", configs.run, other, out=tmp_path / "run", resume=True)


def test_unknown_names_and_keys_are_refused(resolved):
    message = r"no asynchronous server 'fedbuf'\. Did you mean 'fedbuff'"
    refused(message, resolved, asynchronous="fedbuf")
    refused("buffer_size", resolved, asynchronous={"name": "fedbuff", "buffer": 3})
    refused("path", resolved, availability="trace")
