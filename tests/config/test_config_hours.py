"""The hours of a config's runs: steps, rounds, evaluations and points of a sweep, by hand."""

from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from closeness import approx
from internals import DATASETS, Table, hub, silo
from internals import config as configs
from small_config import small

from fedjax_peft import testing
from fedjax_peft.config import hours

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


def in_words(raw):
    """Returns the line of a config without methods, for steps of an hour of three lanes."""
    return str(hours.hours_of(hours.runs_of(raw)[""], 3600.0, 3))


def test_a_sweep_is_the_sum_of_its_points():
    raw = {**CONFIG, "sweep": {"grid": {"seed": [0, 1, 2, 3]}}}
    assert in_words(CONFIG) == "1 run of 10 rounds: 84 to 200 hours (steps of the config)"
    assert in_words(raw).startswith("4 runs of 10 rounds: 340 to 820 hours")


def test_points_with_more_work_count_for_more():
    """60 steps of two waves; 3 and 9 local steps, so once 60 hours and once 180."""
    raw = {**CONFIG, "sweep": {"grid": {"local_steps": [3, 9]}}}
    assert hours.hours_of(hours.runs_of(raw)[""], 3600.0, 3).least == approx(60 + 180)


def test_all_methods_together():
    """Two of three methods are known: 60 and 2 x 60 hours."""
    other = {"optimizer": {"learning_rate": 0.5}, "sweep": {"grid": {"seed": [0, 1]}}}
    raw = {**CONFIG, "methods": {"a": {}, "b": other}}
    runs = hours.runs_of(raw)
    found = [hours.hours_of(runs[name], 3600.0, 3) for name in ("a", "b")]
    assert hours.together(found) == "together: 250 to 610 hours"
    found.append(found[0]._replace(least=None))
    assert hours.together(found) == "together: 250 to 610 hours for 2 of 3 methods"
    assert hours.together(found[2:]) == "together: not known"


def test_points_of_another_shape_have_steps_of_their_own():
    """A step takes as many hours as the rank; 60 steps each."""
    grid = {"peft.rank": [1, 4], "seed": [0, 1], "optimizer.learning_rate": [1e-3, 1e-2]}
    runs = hours.runs_of({**CONFIG, "sweep": {"grid": grid}})[""]
    found = hours.hours_of(runs, lambda config: 3600.0 * config["peft"]["rank"], 3)
    assert sorted(found.each) == [approx(60)] * 4 + [approx(240)] * 4
    assert len({hours.program_of(configs.resolve(run)) for run in runs}) == 2


def test_the_end_on_several_workers():
    """Runs of 60 and 180 hours: two of 180 on two workers, then four of 60."""
    raw = {**CONFIG, "sweep": {"grid": {"local_steps": [3, 9], "seed": [0, 1]}}}
    found = [hours.hours_of(hours.runs_of(raw)[""], 3600.0, 3)]
    now = datetime(2026, 11, 28, 12)
    said = hours.on_workers(found, 2, now)
    assert said.startswith("with 2 workers: 340 to 820 hours; begun now, it ends Sat 12 Dec 12:00")
    assert hours.on_workers(found, 4, now).startswith("with 4 workers: 250 to 610 hours")
    assert hours.on_workers(found, 9, now) == hours.on_workers(found, 4, now).replace("4 w", "9 w")
    unknown = [found[0]._replace(least=None)]
    assert hours.on_workers(unknown, 2, now) == "with 2 workers: not known"
    assert len(hours.runs_of(CONFIG, ["seed=0..4"])[""]) == 5


@pytest.mark.parametrize("key", ["clients_per_round", "local_steps"])
def test_what_only_the_data_know_is_said(key):
    raw = {**CONFIG, "partition": {"name": "natural", "by": "client"}}
    del raw[key]
    assert "only the data know" in in_words(raw)


@pytest.mark.parametrize(
    ("data", "partition", "clients", "steps"),
    [
        ({"name": "mrqa"}, {"name": "iid", "clients": 300}, 300, 10),  # 45,500 / 300 / 16
        ({"name": "alpaca"}, {"name": "iid", "clients": 2600}, 2600, 2),  # .8 x 52,002 / 2,600
        ({"name": "alpaca", "test_share": 0.5}, {"name": "iid", "clients": 1000}, 1000, 2),
        ({"name": "dolly"}, {"name": "natural", "by": "category"}, 8, 94),  # .8 x 15,011 / 8
        ({"name": "glue_silo"}, {"name": "natural", "by": "task"}, 6, 145),  # 13,885 / 6
        ({"name": "glue_silo", "split": "fedpetuning"}, {"name": "natural", "by": "task"}, 6, 217),
        ({"name": "cifar100"}, {"name": "natural", "clients": 9}, 9, 7),  # 100 images each
        ({"name": "cifar100"}, {"name": "grouped", "groups": 9, "of": 27}, 9, 19),
        ({"name": "emnist"}, {"name": "natural", "clients": 9}, 9, None),
        ({"name": "shakespeare", "users": 9}, {"name": "natural"}, None, None),
    ],
)
def test_clients_and_their_mean_examples(data, partition, clients, steps):
    raw = {**CONFIG, "data": data, "partition": partition, "clients_per_round": None}
    del raw["local_steps"], raw["clients_per_round"]
    work = hours.work_of(configs.resolve(raw))
    assert (work.clients, work.steps) == (clients, steps)


def test_the_silo_has_the_stated_examples():
    """Tables of the sizes of GLUE's tasks, cut by the code that cuts the real ones."""
    sizes = {
        task: list(hours.examples_of({"name": task}).values())
        for task in DATASETS["glue_silo"].parts
    }
    for split in ("6:2:2", "fedpetuning"):
        found = {"train": 0, "test": 0}
        for task, (train, test) in sizes.items():
            tables = {
                part: Table(part, {"label": list(np.arange(count) % 2)})
                for part, count in {"train": min(train, 9_000), "test": min(test, 900)}.items()
            }
            parts = silo.divide(task, tables, split, 0)
            found = {part: n + len(parts[part]) for part, n in found.items()}
        assert hours.examples_of({"name": "glue_silo", "split": split}) == found


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


def test_steps_are_exact_where_the_data_are_at_hand(tmp_path):
    """Each client rounds its batches up by itself: a mean of the examples would not do."""
    rows = [f"w{i} w{i % 7},{'ab'[i % 2]},{min(i // 45, 2)}" for i in range(100)]
    (tmp_path / "mine.csv").write_text("\n".join(["text,label,client", *rows]))
    encoder = testing.write_tiny_checkpoint(tmp_path / "encoder")
    raw = {**CONFIG, "data": {"name": str(tmp_path / "mine.csv"), "test_share": 0.1}, "epochs": 2}
    raw |= {"model": {"name": str(encoder)}, "partition": {"name": "natural"}}
    del raw["local_steps"], raw["clients_per_round"]
    config = configs.resolve(raw)
    sizes = [*map(len, configs.federation(config)[1].indices)]
    work = hours.work_of(config)
    assert work.clients == len(sizes) == 3
    assert sum(sizes) + work.tested == 100
    assert work.note == "steps from the clients' examples"
    assert work.steps == approx(sum(2 * -(-n // 16) for n in sizes) / 3)
    assert hours.work_of(configs.resolve({**raw, "local_steps": 1})).steps == approx(1)
    before = hours._divided.cache_info().misses
    other = {**raw, "optimizer": {"name": "sgd", "learning_rate": 0.5}, "seed": 3}
    assert hours.work_of(configs.resolve(other)) == work
    assert hours._divided.cache_info().misses == before  # a sweep over rates reads the data once
