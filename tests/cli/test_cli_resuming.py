"""``fedjax-peft resume`` continues an interrupted run; its overrides need not be repeated."""

import json
import shutil
from pathlib import Path

import pytest

from fedjax_peft import testing
from fedjax_peft.cli import main as cli
from fedjax_peft.config import config as configs
from fedjax_peft.simulation import record
from fedjax_peft.simulation.interrupts import Terminated

pytestmark = pytest.mark.slow

CONFIG = """
rounds = 3
clients_per_round = 2
[model]
name = "{root}/model"
[data]
name = "{root}/data"
max_length = 16
[partition]
name = "iid"
clients = 4
[peft]
name = "lora"
rank = 2
[optimizer]
learning_rate = 3e-3
"""
METHODS = """
[methods.one]
[methods.two]
peft.rank = 3
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a tiny model, tiny texts and two configs."""
    root = tmp_path_factory.mktemp("project")
    testing.write_tiny_checkpoint(root / "model")
    testing.write_tiny_texts(root / "data", train=24, test=8)
    (root / "single.toml").write_text(CONFIG.format(root=root))
    (root / "several.toml").write_text(CONFIG.format(root=root) + METHODS)
    return root


@pytest.fixture
def runs(monkeypatch):
    """Replaces training: a call is recorded, and writes a finished or an interrupted run."""
    calls, interrupted = [], set()

    def run(config, *, out, resume=False, **_):
        calls.append((config, out, resume))
        out.mkdir(parents=True, exist_ok=True)
        record.write_config(out / "config.toml", config)
        (out / "environment.json").write_text("{}")
        stop = out.name in interrupted
        rounds = 1 if stop else config["rounds"]
        rows = [json.dumps({"round": n}) for n in range(rounds + 1)]
        (out / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        (out / "checkpoints" / str(rounds)).mkdir(parents=True, exist_ok=True)
        if stop:
            interrupted.discard(out.name)
            raise run.ends

    monkeypatch.setattr(configs, "run", run)
    run.calls, run.interrupted, run.ends = calls, interrupted, KeyboardInterrupt
    return run


def test_an_interrupt_prints_the_command_to_continue(project, tmp_path, runs, capsys):
    out = tmp_path / "my run"
    runs.interrupted.add("my run")
    arguments = ["run", str(project / "single.toml"), "peft.rank=5", "seed=7", "--out", str(out)]
    assert cli.main(arguments) == 130
    error = capsys.readouterr().err
    assert error.endswith(f"interrupted. Continue with: fedjax-peft resume '{out}'\n")
    assert cli.main(["resume", str(out)]) == 0
    (first, _, _), (again, where, resume) = runs.calls
    assert record.config_text(again) == record.config_text(first)
    assert (where, resume) == (out, True)
    assert (again["peft"]["rank"], again["seed"]) == (5, 7)


def test_sigterm_prints_it_too(project, tmp_path, runs, capsys):
    runs.interrupted.add("run")
    runs.ends = Terminated
    assert cli.main(["run", str(project / "single.toml"), "--out", str(tmp_path / "run")]) == 143
    advice = f"ended by SIGTERM. Continue with: fedjax-peft resume {tmp_path / 'run'}\n"
    assert capsys.readouterr().err.endswith(advice)


def test_methods_without_a_run_yet_are_resumed_too(project, tmp_path, runs, capsys):
    out = tmp_path / "runs"
    runs.interrupted.add("one")
    several = str(project / "several.toml")
    assert cli.main(["run", several, "peft.rank=4", "--out", str(out)]) == 130
    assert not (out / "two").exists()
    assert cli.main(["resume", str(out)]) == 0
    assert [(c["name"], c["peft"]["rank"], o.name) for c, o, _ in runs.calls] == [
        ("one", 4, "one"),
        ("one", 4, "one"),
        ("two", 4, "two"),
    ]
    assert "one" in capsys.readouterr().out
    # More rounds for one of the methods, then for all of them.
    assert cli.main(["resume", str(out / "two"), "rounds=4"]) == 0
    assert runs.calls[-1][0]["rounds"] == 4
    assert cli.main(["resume", str(out), "rounds=5"]) == 0
    assert [c["rounds"] for c, _, _ in runs.calls[-2:]] == [5, 5]


def test_the_recorded_config_is_resumed_in_its_directory(project, tmp_path, runs, monkeypatch):
    out = tmp_path / "elsewhere"
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", str(project / "single.toml"), "--out", str(out)]) == 0
    assert cli.main(["run", str(out / "config.toml"), "rounds=9", "--resume"]) == 0
    assert [o for _, o, _ in runs.calls] == [out, out]
    assert not (tmp_path / "runs").exists()


def test_errors_when_there_is_nothing_to_resume(project, tmp_path, runs, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["resume", str(tmp_path / "none")],
        ["resume", str(project)],
    ):
        assert cli.main(arguments) == 2
        assert "There is nothing to resume: " in capsys.readouterr().err
    out = tmp_path / "run"
    cli.main(["run", str(project / "single.toml"), "--out", str(out)])
    assert cli.main(["resume", str(tmp_path / "runn")]) == 2
    assert "Did you mean 'run'?" in capsys.readouterr().err
    assert cli.main(["resume", str(out)]) == 0
    text = capsys.readouterr().out
    assert "has finished all 3 rounds" in text
    assert f"fedjax-peft resume {out} rounds=6" in text
    assert len(runs.calls) == 1


def test_resume_begins_what_has_not_begun_and_says_so(project, tmp_path, runs, capsys):
    """A job that a scheduler starts again does not know whether it was killed before it began."""
    several, out = ["run", str(project / "several.toml"), "--resume", "--out"], tmp_path / "x"
    runs.interrupted.add("two")
    assert cli.main([*several, str(out)]) == 130
    text = capsys.readouterr().err
    assert f"one: there is nothing to continue in {out / 'one'}, so the run begins\n" in text
    assert f"two: there is nothing to continue in {out / 'two'}, so the run begins\n" in text
    assert cli.main([*several, str(out)]) == 0
    assert "nothing to continue" not in capsys.readouterr().err
    single = tmp_path / "y"
    single.mkdir()
    (single / "environment.json").write_text("{}")  # killed before the config was written
    assert cli.main(["run", str(project / "single.toml"), "--resume", "--out", str(single)]) == 0
    assert "nothing to continue" in capsys.readouterr().err
    assert [resume for _, _, resume in runs.calls] == [True] * 5


def test_the_config_of_a_run_without_rows_continues_it(project, tmp_path, runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", str(project / "single.toml"), "--out", "here"]) == 0
    (tmp_path / "here" / "metrics.jsonl").unlink()
    assert cli.main(["run", "here/config.toml", "--resume"]) == 0
    assert runs.calls[-1][1] == Path("here")


def test_a_run_is_resumed_from_its_directory_alone(project, tmp_path):
    def rows(out):
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return [{**json.loads(line), "time": 0} for line in lines]

    straight, out = tmp_path / "straight", tmp_path / "run"
    config = str(project / "single.toml")
    assert cli.main(["run", config, "local_steps=1", "--out", str(straight), "-q"]) == 0
    shorter = [config, "local_steps=1", "rounds=2", "--out", str(out), "-q"]
    assert cli.main(["run", *shorter]) == 0
    moved = tmp_path / "moved"
    shutil.move(out, moved)
    assert cli.main(["resume", str(moved), "rounds=3", "-q"]) == 0
    assert rows(moved) == rows(straight)
