"""Configs and runs of versions before 0.2: upgraded, read, and not continued.

``tests/golden/earlier_run`` is a run that version 0.1 has recorded (FedSA-LoRA on 24 reviews).
"""

import shutil
import tomllib
from pathlib import Path

import jax.numpy as jnp
import pytest
from closeness import assert_close
from shallow import draw_nothing

import fedjax_peft as fp
from fedjax_peft.cli import main as cli
from fedjax_peft.config import config as configs
from fedjax_peft.config.upgrade import upgraded
from fedjax_peft.report.records import load_run
from fedjax_peft.simulation.records import MOVED, RECORDS
from fedjax_peft.simulation.storage import earlier
from fedjax_peft.support.errors import InputError

RUN = Path(__file__).parents[1] / "golden" / "earlier_run"
OLD = """\
# a study
name = "lanes"
lanes = 2 # two
"eval_every" = 5
system = "federa"   # a preset
diagnostics = [ # one a line
  "clients",
]

[model]
name = "system"

[sweep]
constants = ["failure_rate", 'algorithm.mu']
[sweep.grid]
"failure_rate" = [0.1, 0.2]
deadline = [1.0]
"optimizer.learning_rate" = [1e-3]
system = ["federa", "fedlr"]

[methods.lanes] # a name
system = "fedlr"
client_test = true
rounds = 3
[methods."b c".sweep.grid]
lanes = [1, 2]
"""
NEW = """\
# a study
name = "lanes"
placement.lanes = 2 # two
evaluation.every = 5
preset = "federa"   # a preset
evaluation.diagnostics = [ # one a line
  "clients",
]

[model]
name = "system"

[sweep]
constants = ["system.failure_rate", 'algorithm.mu']
[sweep.grid]
"system.failure_rate" = [0.1, 0.2]
"system.deadline" = [1.0]
"optimizer.learning_rate" = [1e-3]
preset = ["federa", "fedlr"]

[methods.lanes] # a name
preset = "fedlr"
evaluation.client_test = true
rounds = 3
[methods."b c".sweep.grid]
"placement.lanes" = [1, 2]
"""


def test_a_file_is_rewritten_in_place(tmp_path, capsys):
    file = tmp_path / "a.toml"
    file.write_text(OLD)
    assert cli.main(["config", "upgrade", str(file)]) == 0
    assert file.read_text() == NEW
    printed = capsys.readouterr().out
    assert "lanes -> placement.lanes, eval_every -> evaluation.every, system -> preset" in printed
    assert cli.main(["config", "upgrade", str(file)]) == 0
    assert file.read_text() == NEW
    assert "has present keys already" in capsys.readouterr().out


def test_the_text_says_what_the_conversion_says():
    assert upgraded(OLD)[0] == NEW
    assert tomllib.loads(NEW) == earlier.upgrade(tomllib.loads(OLD))
    assert not earlier.is_earlier(tomllib.loads(NEW))
    assert upgraded("lanes = 1\r\n\r\n[system]\r\nlate = 'drop'\r\n")[0].count("\r\n") == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("methods = { a = { lanes = 2 } }", "inside an inline table"),
        ("lanes = 2\nplacement.lanes = 3", "has both 'lanes' and 'placement.lanes'"),
        ("lanes = 2\n[placement]\ndevices = 1", "would not be TOML"),
        ("lanes = ", "is not a TOML file"),
    ],
)
def test_a_file_that_is_left_as_it_was(text, expected, tmp_path, capsys):
    file = tmp_path / "a.toml"
    file.write_text(text)
    assert cli.main(["config", "upgrade", str(file)]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
    assert file.read_text() == text


def test_the_record_of_a_run_is_left_as_it_is(tmp_path, capsys):
    shutil.copytree(RUN, tmp_path / "run")
    assert cli.main(["config", "upgrade", str(tmp_path / "run" / "config.toml")]) == 2
    assert "the config of a run" in " ".join(capsys.readouterr().err.split())


LATER = ("placement.reuse",)
"""Options that no earlier form had."""


def test_every_earlier_key_has_a_place():
    places = {key.dotted for key in configs.all_keys()} | {*configs.NAMESPACES, "time"}
    assert set(earlier.RENAMED.values()) <= places
    moved = {old: new for old, new in MOVED.items() if new in places and new not in LATER}
    assert moved.items() <= {**earlier.RENAMED, "time_model": "system.time"}.items()
    assert {new.partition(".")[0] for new in moved.values()} == {*RECORDS}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("lanes=2", "'lanes' is now 'placement.lanes'. Write placement.lanes = 2; on the command"),
        ("eval_every=3", "'evaluation.every=3'"),
        ('system="federa/fedlr"', 'Write preset = "federa/fedlr"'),
        ("client_test=true", "evaluation.client_test = true"),
        ("diagnostics=['clients']", 'evaluation.diagnostics = ["clients"]'),
    ],
)
def test_an_earlier_key_is_refused_with_its_new_place(override, expected):
    with pytest.raises(InputError) as error:
        configs.resolve(configs.override({"rounds": 1}, override))
    assert expected in str(error.value)
    assert "fedjax-peft config upgrade FILE" in str(error.value)


def test_an_earlier_run_is_read():
    record, run = load_run(RUN), fp.load_run(RUN)
    assert record.finished
    assert record.config["system"]["client_ranks"] == run.client_ranks == [1, 2]
    assert record.config["preset"] == "fedlr"
    assert record.config["evaluation"]["client_holdout"] == 0.25
    assert record.config["preset_changes"]["algorithm.name"] == "fedavg -> fedsa"
    assert configs.resolve_recorded(record.config)["placement"]["lanes"] == 1
    # what version 0.1 predicted
    expected = [[-0.01162165, 0.01032731], [-0.00161323, 0.0010119]]
    found = run.predict(["good fine", "awful sad"], client=1)
    assert_close(jnp.asarray(found), jnp.asarray(expected), rtol=1e-4, atol=1e-6)


def test_an_earlier_run_is_reported_and_exported(tmp_path, monkeypatch):
    draw_nothing(monkeypatch)
    assert cli.main(["report", str(RUN), "--out", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "report.html").exists()
    out = tmp_path / "adapter"
    words = ["export", str(RUN), "--client", "1", "--format", "peft", "--out", str(out)]
    assert cli.main(words) == 0
    assert (out / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("words", [["resume"], ["run", "--resume"]])
def test_an_earlier_run_is_not_continued(words, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    command = [words[0], str(run)]
    if words[0] == "run":
        (tmp_path / "config.toml").write_text(upgraded((RUN / "config.toml").read_text())[0])
        command = ["run", str(tmp_path / "config.toml"), "--resume", "--out", str(run)]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert cli.main(command) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "is a run of an earlier version of fedjax_peft, which cannot be continued" in said
    assert f"--from {run}" in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
