"""``experiments/robustness``: its commands resolve, and its script makes figure and tables."""

import csv
import itertools
import re
import runpy
import shlex
from pathlib import Path

import pytest
from internals import config, plan
from made_runs import columns, write_sweep
from shallow import no_drawings  # noqa: F401

from fedjax_peft import aggregators, attacks

pytestmark = pytest.mark.usefixtures("no_drawings")

FOLDER = Path(__file__).parents[1] / "experiments" / "robustness"
SCRIPT = runpy.run_path(str(FOLDER / "figures.py"))
README = (FOLDER / "README.md").read_text()
NOT_ROBUST = {"flexlora", "flora_na", "fra", "hetlora", "ilora", "lora_fair", "mean", "raflora"}


def commands():
    """Returns name -> overrides of the attacks of the README."""
    found = {}
    for line in re.findall(r"^sweep (\w+.*)$", README, re.MULTILINE):
        name, *overrides = shlex.split(line.replace("$share", "0.2"))
        found[name] = overrides
    return found


@pytest.mark.parametrize("name", commands())
@pytest.mark.sample("none", "ipm", "backdoor")
def test_a_command_has_all_defences(name):
    sweep = plan(config.load(FOLDER / "sst2.toml"), commands()[name])
    assert len(sweep.points) == 60, "as the head of the config says"
    assert sweep.keys == ["seed"]
    for point in sweep.points[:20]:
        table = point.config["attack"]
        assert table.get("name", "none") == name
        assert table.get("share", 0.2) == 0.2
        config.build(point.config, "attack")
        assert point.config["partition"]["clients"] == 20
        assert point.config["clients_per_round"] is None, "all take part"
        assert SCRIPT["label"](point.method).split(",")[0] in SCRIPT["RULES"].values()
    used = {point.config["aggregator"]["name"] for point in sweep.points}
    assert used == {*aggregators.__all__} - NOT_ROBUST | {"mean", "fra"}


def test_every_attack_is_compared():
    assert set(commands()) == {"none", *attacks.__all__} == set(SCRIPT["ATTACKS"])


def test_the_trusted_client_is_honest_for_each_seed():
    sweep = plan(config.load(FOLDER / "sst2.toml"), commands()["ipm"], ["fltrust"])
    assert {point.config["attack"]["seed"] for point in sweep.points} == {None}, "that of the run"
    seeds = [point.config["seed"] for point in sweep.points]
    assert attacks.ipm(0.2, seed=seeds[0]).hostile(20) == (0, 7, 14, 16), (
        "as the config's head says"
    )
    hostile = {client for seed in seeds for client in attacks.ipm(0.4, seed=seed).hostile(20)}
    trusted = {point.config["aggregator"]["trusted"] for point in sweep.points}
    assert not trusted & hostile


@pytest.fixture
def sweeps(tmp_path):
    """Made-up runs: products are better than factors by a point, attacks take ten."""
    methods = [*enumerate(("mean", "fra", "median", "median_product"))]
    for attack, share in [("none", 0.0), ("ipm", 0.2), ("ipm", 0.4), ("backdoor", 0.2)]:
        runs = []
        for (i, method), seed in itertools.product(methods, range(3)):
            score = 0.7 - share / 2 + 0.01 * (i % 2) + 0.02 * seed
            success = 0.5 if attack == "backdoor" else None
            rows = columns(
                test_accuracy=(0.5, None, score), test_backdoor_success=(None, None, success)
            )
            settings = {"name": method, "seed": seed}
            settings |= {"attack": {"name": attack, "share": share}} if share else {}
            runs.append((settings, rows))
        write_sweep(tmp_path / f"{attack}_{share}", runs, keys=["seed"])
    return tmp_path


def test_the_script_writes_the_figure_and_the_tables(sweeps, tmp_path, capsys):
    out = tmp_path / "out"
    SCRIPT["main"]([str(sweeps), "--out", str(out)])
    names = {path.name for path in out.iterdir()}
    assert names == {f"heat_map.{form}" for form in ("png", "svg", "pdf", "csv")} | {
        f"{table}.{form}"
        for table in ("accuracy", "spaces", "backdoor", "shares")
        for form in ("md", "csv", "tex")
    }
    tables = {}
    for name in ("accuracy", "spaces", "backdoor", "shares"):
        with (out / f"{name}.csv").open() as file:
            tables[name] = list(csv.reader(file))
    assert tables["accuracy"][0] == ["defence", "none", "IPM", "backdoor"]
    assert tables["accuracy"][1] == ["mean, factors", "72.0 ± 2.0", "62.0 ± 2.0", "62.0 ± 2.0"]
    assert [row[0] for row in tables["accuracy"][1:]] == [
        *("mean, factors", "mean, products", "median, factors", "median, products")
    ]
    assert [row[0] for row in tables["spaces"][1:]] == ["mean", "median"]
    assert tables["spaces"][1][1].startswith("+1.0")
    assert tables["backdoor"][1] == ["mean, factors", "72.0 ± 2.0", "62.0 ± 2.0", "50.0 ± 0.0"]
    assert tables["shares"][0][1:] == ["0 %", "20 %", "40 %"]
    assert tables["shares"][1][1:] == ["72.0 ± 2.0", "62.0 ± 2.0", "52.0 ± 2.0"]


def test_without_runs_the_script_says_so(tmp_path, capsys):
    with pytest.raises(SystemExit):
        SCRIPT["main"]([str(tmp_path), "--out", str(tmp_path / "out")])
    assert "there are no finished runs" in capsys.readouterr().err
