"""``fedjax-peft resume`` continues an interrupted run; its overrides need not be repeated."""

import json
from pathlib import Path

import pytest
from internals import Terminated, cli, record
from internals import config as configs

pytestmark = pytest.mark.slow

METHODS = """
[methods.one]
[methods.two]
peft.rank = 3
"""


@pytest.fixture(scope="module")
def several(project):
    """The config of two methods."""
    path = project / "several.toml"
    path.write_text((project / "config.toml").read_text() + METHODS)
    return str(path)


@pytest.fixture(scope="module")
def single(project):
    return str(project / "config.toml")


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


def test_an_interrupt_prints_the_command_to_continue(single, tmp_path, runs, capsys):
    out = tmp_path / "my run"
    runs.interrupted.add("my run")
    arguments = ["run", single, "peft.rank=5", "seed=7", "--out", str(out)]
    assert cli.main(arguments) == 130
    error = capsys.readouterr().err
    assert error.endswith(f"interrupted. Continue with: fedjax-peft resume '{out}'\n")
    assert cli.main(["resume", str(out)]) == 0
    (first, _, _), (again, where, resume) = runs.calls
    assert record.config_text(again) == record.config_text(first)
    assert (where, resume) == (out, True)
    assert (again["peft"]["rank"], again["seed"]) == (5, 7)


def test_sigterm_prints_it_too(single, tmp_path, runs, capsys):
    runs.interrupted.add("run")
    runs.ends = Terminated
    assert cli.main(["run", single, "--out", str(tmp_path / "run")]) == 143
    advice = f"ended by SIGTERM. Continue with: fedjax-peft resume {tmp_path / 'run'}\n"
    assert capsys.readouterr().err.endswith(advice)


@pytest.mark.parametrize("ends", [BrokenPipeError, SystemExit(1)])  # print's, and rich's
def test_a_reader_that_closes_the_output_does_not_end_a_run_without_a_word(
    single, tmp_path, runs, capsys, ends
):
    runs.interrupted.add("run")
    runs.ends = ends
    assert cli.main(["run", single, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "The reader of the output has closed it" in error
    assert error.endswith(f"Continue with: fedjax-peft resume {tmp_path / 'run'}\n")


def test_an_interrupt_before_a_run_has_begun_says_so(
    single, several, tmp_path, monkeypatch, capsys
):
    """While data and weights are loaded, the folder holds nothing that could be resumed."""

    def run(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(configs, "run", run)
    assert cli.main(["run", single, "--out", str(tmp_path / "one")]) == 130
    assert capsys.readouterr().err.endswith(". The run had not begun: give the command again.\n")
    assert cli.main(["run", several, "--out", str(tmp_path / "two")]) == 130
    assert capsys.readouterr().err.endswith(f"fedjax-peft resume {tmp_path / 'two'}\n")


def test_methods_without_a_run_yet_are_resumed_too(several, tmp_path, runs, capsys):
    out = tmp_path / "runs"
    runs.interrupted.add("one")
    assert cli.main(["run", several, "local_steps=4", "--out", str(out)]) == 130
    assert not (out / "two").exists()
    assert cli.main(["resume", str(out)]) == 0
    assert [(c["name"], c["local_steps"], o.name) for c, o, _ in runs.calls] == [
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


def test_the_recorded_config_is_resumed_in_its_directory(single, tmp_path, runs, monkeypatch):
    out = tmp_path / "elsewhere"
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", single, "--out", str(out)]) == 0
    assert cli.main(["run", str(out / "config.toml"), "rounds=9", "--resume"]) == 0
    assert [o for _, o, _ in runs.calls] == [out, out]
    assert not (tmp_path / "runs").exists()


def test_errors_when_there_is_nothing_to_resume(single, tmp_path, runs, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.toml").write_text("rounds = 2\n")  # as `init` writes it
    for name in ("none", "empty", "project"):
        assert cli.main(["resume", str(tmp_path / name)]) == 2
        assert "There is nothing to resume: " in capsys.readouterr().err
    out = tmp_path / "run"
    cli.main(["run", single, "--out", str(out)])
    assert cli.main(["resume", str(tmp_path / "runn")]) == 2
    assert "Did you mean 'run'?" in capsys.readouterr().err
    assert cli.main(["resume", str(out)]) == 0
    text = capsys.readouterr().out
    assert "has finished its 2 rounds" in text
    assert f"fedjax-peft resume {out} rounds=4" in text
    assert len(runs.calls) == 1
    assert cli.main(["resume", str(out), "peft.rank=5"]) == 0  # a real run refuses it
    assert len(runs.calls) == 2


def test_resume_begins_what_has_not_begun_and_says_so(several, single, tmp_path, runs, capsys):
    """A job that a scheduler starts again does not know whether it was killed before it began."""
    command, out = ["run", several, "--resume", "--out"], tmp_path / "x"
    runs.interrupted.add("two")
    assert cli.main([*command, str(out)]) == 130
    text = capsys.readouterr().err
    assert f"one: there is nothing to continue in {out / 'one'}, so the run begins\n" in text
    assert f"two: there is nothing to continue in {out / 'two'}, so the run begins\n" in text
    assert cli.main([*command, str(out)]) == 0
    assert "nothing to continue" not in capsys.readouterr().err
    begun = tmp_path / "y"
    begun.mkdir()
    (begun / "environment.json").write_text("{}")  # killed before the config was written
    assert cli.main(["run", single, "--resume", "--out", str(begun)]) == 0
    assert "nothing to continue" in capsys.readouterr().err
    assert [resume for _, _, resume in runs.calls] == [True] * 5


def test_the_config_of_a_run_without_rows_continues_it(single, tmp_path, runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", single, "--out", "here"]) == 0
    (tmp_path / "here" / "metrics.jsonl").unlink()
    assert cli.main(["run", "here/config.toml", "--resume"]) == 0
    assert runs.calls[-1][1] == Path("here")


def test_overrides_of_a_resume_leave_no_wrong_name(several, tmp_path, runs, capsys):
    """A method without a run yet could take another algorithm, or the label of another preset."""
    out = tmp_path / "runs"
    runs.interrupted.add("one")
    assert cli.main(["run", several, "--out", str(out)]) == 130
    for preset in ("preset=federa", "methods.two.preset=federa"):
        assert cli.main(["resume", str(out), preset]) == 2
        assert f"{preset} changes no setting of" in capsys.readouterr().err
    assert cli.main(["resume", str(out), "peft.rank=3"]) == 2
    assert "'one', 'two' would be the same run" in capsys.readouterr().err
    assert cli.main(["resume", str(out), "methods.two.algorithm=ffa"]) == 0
    assert [c["name"] for c, _, _ in runs.calls[-2:]] == ["one", "two (algorithm=ffa)"]
