"""The hours of a config's runs: steps, rounds, evaluations and points of a sweep, by hand."""

from pathlib import Path

import pytest
from closeness import approx
from small_config import small

from fedjax_peft.config import config as configs
from fedjax_peft.config import hours
from fedjax_peft.models import hub

CONFIG = small(
    rounds=10,
    clients_per_round=6,
    batch_size=16,
    local_steps=3,
    evaluation={"every": 5},
    partition={"name": "iid", "clients": 30},
)


def test_a_run_by_hand():
    """Two waves of three lanes, three steps each; nothing is known about the test data."""
    assert hours.run_hours(configs.resolve(CONFIG), 2.0, 3) == approx(10 * 2 * 3 * 2 / 3600)


def test_steps_and_evaluations_from_the_catalogue():
    """67,349 examples of 30 clients: 141 batches; 872 test examples, a third of a step each."""
    raw = {**CONFIG, "data": {"name": "sst2"}, "epochs": 2}
    del raw["local_steps"]
    config = configs.resolve(raw)
    work = hours.work_of(config)
    assert (work.steps, work.tested, work.evaluations) == (2 * 141, 872, 2)
    training, tested = 10 * 2 * 282 * 2.0, 2 * 872 / (16 * 3) * 2.0 / 3
    assert hours.run_hours(config, 2.0, 3) == approx((training + tested) / 3600)


def test_a_sweep_is_the_sum_of_its_points():
    raw = {**CONFIG, "sweep": {"grid": {"seed": [0, 1, 2, 3]}}}
    one = hours.in_words(CONFIG, [], "", (3, 3600.0))
    four = hours.in_words(raw, [], "", (3, 3600.0))
    assert one.startswith("1 run of 10 rounds: 84 to 204 hours (steps of the config)")
    assert four.startswith("4 runs of 10 rounds: 336 to 816 hours")


@pytest.mark.parametrize("key", ["clients_per_round", "local_steps"])
def test_what_only_the_data_know_is_said(key):
    raw = {**CONFIG, "partition": {"name": "natural", "by": "client"}}
    del raw[key]
    assert "only the data know" in hours.in_words(raw, [], "", (1, 1.0))


def test_the_papers_models_are_known_without_a_network(tmp_path, monkeypatch):
    """By name, and by the path of a ``config.json``; nothing may be downloaded."""
    monkeypatch.setattr(hub, "_download", lambda *_: pytest.fail("downloaded"))
    papers = Path(__file__).parents[2] / "experiments"
    for path in sorted(papers.glob("*/paper/*.toml")):
        for raw in configs.methods(configs.load(path)).values():
            model = configs.resolve(raw)["model"]
            assert model["config"] or hub.read_config(model["name"])["model_type"]
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    assert hub.read_config(tmp_path / "config.json") == {"model_type": "gpt2"}
