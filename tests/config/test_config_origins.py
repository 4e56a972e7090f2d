"""A config that starts from a run keeps the seeds of that run's data."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import toy
from internals import config as configs
from internals import digests, save_rows, sweeps, write_config
from refusals import refused
from small_config import small

from fedjax_peft import InputError
from fedjax_peft.config import origins


@pytest.fixture
def run(tmp_path):
    """Returns a function that writes the directory of a run with this config."""

    def make(config, name="run"):
        (tmp_path / name).mkdir()
        write_config(tmp_path / name / "config.toml", config)
        (tmp_path / name / "environment.json").write_text("{}")
        return tmp_path / name

    return make


def seeds(config):
    return [config[table].get(key) for table, key in origins.OF_THE_DATA.items()]


def test_splits_clients_and_holdouts_keep_the_seeds_of_the_origin(run):
    assert seeds(configs.resolve(small(seed=1))) == [None, None, None]
    first = run(small(seed=5, partition={"name": "iid", "clients": 4, "seed": 7}))
    again = configs.resolve(small(seed=1, origin=str(first)))
    assert (again["seed"], seeds(again)) == (1, [5, 7, 5])
    # A run from that one keeps them too, and what is written stays.
    second = run(again, "second")
    third = configs.resolve(small(seed=2, origin=str(second), data={"name": "here", "seed": 9}))
    assert seeds(third) == [9, 7, 5]
    assert configs.resolve_recorded(third) == third


def test_a_run_in_python_and_a_partition_without_seed_have_none(run):
    made = run({"seed": 3, "rounds": 1, "algorithm": "fedavg"}, "python")
    assert seeds(configs.resolve(small(origin=str(made)))) == [None, None, None]
    natural = {"name": "natural"}
    config = configs.resolve(small(origin=str(run(small(seed=5))), partition=natural))
    assert config["data"]["seed"] == 5


@pytest.mark.parametrize("place", ["run/exported/client_0001", "elsewhere"])
@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_an_adapter_or_a_model_of_a_run_is_an_origin_also_in_a_sweep(kind, place, run, tmp_path):
    first, place = run(small(seed=5)), tmp_path / place
    place.mkdir(parents=True)
    if place.name == "elsewhere":
        (place / "trained_by.txt").write_text("../run\n")
    tables = {"model": {"name": str(place)}}
    if kind == "adapter":
        tables = {"peft": {"name": "pretrained", "adapter": str(place)}}
    points = sweeps.plan(small(**tables), ["seed=0..2"]).points
    assert [point.config["seed"] for point in points] == [0, 1, 2]
    assert all(seeds(point.config)[0] == 5 for point in points)
    assert origins.origin_of(points[0].config) == first
    (line,) = origins.notices(points[0].config)
    assert "data.seed = 5" in line
    assert "seed = 0 is the chance of training" in line


def test_a_resumed_run_keeps_its_seeds_when_its_origin_is_gone(run):
    first = run(small(seed=5))
    config = configs.resolve(small(seed=1, origin=str(first)))
    gone = configs.resolve(small(seed=1, origin=str(first) + "-gone"))
    assert seeds(gone) == [None, None, None]
    assert seeds(origins.with_missing(gone, config)) == seeds(config)


def test_the_name_of_a_model_is_no_path_in_the_folder_of_a_run(run, monkeypatch):
    monkeypatch.chdir(run(small(model={"name": "minilm-l6"})))
    for named in ({"model": {"name": "minilm-l6"}}, {"peft": {"adapter": "owner/adapter"}}):
        config = small(**named, origin=None)
        assert origins.origin_of(config) is None
        origins.check_adapter(config, {"test": toy.dataset(4)})
    Path("exported").mkdir()
    assert origins.origin_of(small(model={"name": "exported"})) == Path.cwd()


def test_the_runs_before_that_of_an_adapter_count_too(run, tmp_path):
    """They may go round in a circle, if a run was made anew from a later one."""
    rows = toy.dataset(12, seed=6)
    own = digests(rows)
    older = run(small(peft={"name": "pretrained", "adapter": str(tmp_path / "newer")}), "older")
    newer = run(small(peft={"name": "pretrained", "adapter": str(older)}), "newer")
    config = configs.resolve(small(peft={"name": "pretrained", "adapter": str(newer)}))
    with pytest.warns(UserWarning, match="does not say"):
        origins.check_adapter(config, {"test": rows})
    save_rows(older, np.sort(own[:3]))
    save_rows(newer, np.sort(own[3:5]))
    origins.check_adapter(config, {"test": rows.take(np.arange(5, 12))})
    with pytest.raises(InputError, match=f"5 of the 12 examples of test are .* of {newer}"):
        origins.check_adapter(config, {"test": rows})
    shutil.rmtree(older)
    refused("2 of the 12 examples of test", origins.check_adapter, config, {"test": rows})
