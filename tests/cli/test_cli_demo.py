"""What the demo says is computed from its runs, and its commands work as they stand."""

import shlex
import sys
from pathlib import Path

import pytest
from internals import RunRecord, build_parser

from fedjax_peft.cli import demo
from fedjax_peft.support.display import program

SCORES = {"fedavg": 0.577, "local": 0.292, "fra": 0.562, "sign": 0.557, "full": 0.582}
SCORES |= {"attacked": 0.05, "defended": 0.412}
BYTES = {"local": 0, "sign": 1925, "full": 5_567_000}


def records(**changed):
    """Returns runs of the demo with these scores, on 600 test texts."""
    found = []
    for name, score in {**SCORES, **changed}.items():
        row = {"headline": "accuracy", "headline_better": "higher", "test_examples": 600}
        rows = [
            {"round": 0, **row, "test_accuracy": 0.05, "bytes_up": 0},
            {"round": 8, **row, "test_accuracy": score, "bytes_up": BYTES.get(name, 61_600)},
        ]
        attack = {"attack": {"name": "ipm", "share": 0.3}} if "ed" in name[-2:] else {}
        config = {"rounds": 8, "seed": 0, "peft": {"name": name}, **attack}
        found.append(RunRecord(f"the {name}", Path("runs/demo") / name, config, {}, rows))
    return found


def test_what_the_runs_show_is_said_in_plain_words():
    assert demo.in_words(records()) == (
        "Alone, a client reaches 29 % on average; together they reach 58 % (the fedavg). Sending"
        " only signs cuts the upload 32-fold. Full fine-tuning sends 90 times as much. On 600 test"
        " texts, the accuracies of those that train together (57.7, 56.2, 55.7 and 58.2 %) cannot"
        " be told apart. With 30 % hostile clients, the mean ends at 5 % and the geometric median"
        " at 41 %."
    )


def test_scores_that_differ_much_are_told_apart():
    said = demo.in_words(records(full=0.9, sign=0.2, fra=0.89))
    assert "On 600 test texts, the full is better than the fedavg and the sign" in said
    assert "; the fra cannot be told apart from it (57.7, 89.0, 20.0 and 90.0 %)." in said


@pytest.mark.parametrize("names", [(), ("fedavg",), ("sign", "attacked"), ("local", "full")])
def test_runs_that_are_missing_are_left_out(names):
    said = demo.in_words([run for run in records() if run.path.name in names])
    assert said == ""


@pytest.mark.parametrize(
    ("called", "on_path", "expected"),
    [
        ("bin/fedjax-peft", False, "bin/fedjax-peft"),
        ("bin/fedjax-peft", True, "fedjax-peft"),
        ("my bin/fedjax-peft", False, "'my bin/fedjax-peft'"),
        ("pytest", False, "fedjax-peft"),
    ],
)
def test_commands_call_the_program_as_the_shell_finds_it(
    called, on_path, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if "/" in called:
        Path(called).parent.mkdir()
        Path(called).write_text("#!/bin/sh\n")
        Path(called).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin") if on_path else str(tmp_path / "other"))
    monkeypatch.setattr(sys, "argv", [called])
    assert program() == expected


def test_the_next_steps_are_commands_of_the_program():
    lines = demo.next_steps(Path("runs/my demo/fedavg"), Path("runs/my demo"))
    commands = [one for line in lines if line.startswith("  ") for one in line.split(" && ")]
    assert len(commands) == 5
    for command in commands:
        first, *words = shlex.split(command)
        assert first == "fedjax-peft"
        options = build_parser().parse_args(words)
        assert getattr(options, "data", None) is None, "a file that is not there"


@pytest.mark.parametrize(
    ("begun", "words", "resumes"),
    [(False, [], False), (True, [], True), (True, ["--overwrite"], False)],
)
def test_an_earlier_demo_stays_and_goes_on(begun, words, resumes, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(demo.running, "run_file", lambda _, options, **out: asked.append(options))
    run = tmp_path / "runs/demo/fedavg"
    run.mkdir(parents=True)
    for name in ("environment.json", "config.toml") if begun else ():
        (run / name).touch()
    monkeypatch.chdir(tmp_path)
    demo.demo(build_parser().parse_args(["demo", "--dry-run", *words]))
    [options] = asked
    assert (options.resume, options.overwrite) == (resumes, bool(words))
