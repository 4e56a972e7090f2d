"""The display of a run, in a terminal and in other outputs."""

import io
import re
import sys
import time

import optax
import pytest
import toy
from internals import Phase, append_metrics, cli, console, text
from options import run_options

import fedjax_peft as fp
from fedjax_peft.cli import results
from fedjax_peft.simulation import progress

MODEL, FEDAVG = toy.model(), fp.algorithms.fedavg(optax.sgd(0.1))


def run(algorithm=FEDAVG, model=MODEL, **options):
    """Runs four clients, two of them per round."""
    options |= {"test": toy.dataset(20, seed=3), "rounds": 2}
    options |= {"clients_per_round": 2, "batch_size": 4}
    return fp.simulate(model, algorithm, toy.clients([7, 4, 12, 1]), **run_options(**options))


def show(tmp_path, verbosity=0, **options):
    """Runs with the display of the command line."""
    path = tmp_path / "metrics.jsonl"
    with console.screen("mine", "fedavg over lora", 2, path, verbosity=verbosity) as screen:
        return run(on_phase=screen, on_round=screen and screen.on_round, **options)


def test_the_banner_estimates_the_first_round(tmp_path, capsys):
    """Its clients, steps and bytes equal those of the first row."""
    seen = []
    result = run(on_phase=seen.append)
    costs, row = seen[0].details["estimate"], result.metrics[1]
    assert costs.clients == len(row["clients"]) == 2
    assert (costs.bytes_up, costs.bytes_down) == (row["bytes_up"], row["bytes_down"])
    assert costs.steps == row["steps"]
    assert costs.memory["data"] == sum(x.nbytes for x in toy.dataset(24).columns.values())
    text = console.banner("mine", "fedavg over lora", seen[0])
    assert "a training step needs more, which `fedjax-peft plan` counts" in text
    assert "computing in float32" in text
    assert text.startswith("mine: fedavg over lora, 2 rounds\n")
    for part in ("4, of which 2 per round", "frozen", f"{costs.steps} local steps", "20 examples"):
        assert part in text
    assert "no client has more" not in text
    larger = seen[0]._replace(details={**seen[0].details, "batch_size": 13})
    assert "12 examples at most: no client has more" in console.banner("mine", "", larger)
    whole = {**seen[0].details, "parameters": {"adapter": 5, "head": 2}}
    text = console.banner("mine", "", seen[0]._replace(details=whole))
    assert "7 trained (5 backbone + 2 head), 0 frozen" in text


def test_the_banner_says_where_the_clients_state_is():
    seen = []
    private = fp.algorithms.fedavg(optax.sgd(0.1), head="private")
    result = run(private, on_phase=seen.append, client_state="disk")
    estimate, record = seen[0].details["estimate"], result.client_state.store.packing.nbytes
    assert estimate.stored == {"disk": 4 * record}
    assert estimate.memory["clients"] == 2 * record
    assert "on the disk" in console.banner("mine", "fedavg over lora", seen[0])


def test_plain_lines(tmp_path, capsys):
    """They are the banner, the compilations and one line for each round."""
    show(tmp_path, model=toy.model())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mine: fedavg over lora")
    assert "mine  compiling (round)" in lines
    assert [x for x in lines if "round 2/2" in x] == lines[-1:]
    assert "training" not in lines[-1]


@pytest.mark.parametrize(("verbosity", "lines"), [(-1, 0), (1, 1)])
def test_quiet_and_verbose(tmp_path, capsys, verbosity, lines):
    """Quiet prints nothing; verbose prints the duration of every round."""
    show(tmp_path, verbosity)
    printed = capsys.readouterr().out
    assert bool(printed) == bool(lines)
    assert sum(" training 0." in line for line in printed.splitlines()) >= lines


class Terminal(io.StringIO):
    """A stdout that is a terminal."""

    def isatty(self):
        """Returns True."""
        return True


def test_a_terminal_has_a_bar(tmp_path, monkeypatch):
    """The bar shows the metrics of the last round. Names are not interpreted as markup."""
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with console.screen("[red]x", "fedavg", 2, tmp_path / "metrics.jsonl") as screen:
        run(on_phase=screen, on_round=screen.on_round)
    printed = terminal.getvalue()
    assert "[red]x: fedavg, 2 rounds\n  clients" in printed
    assert "2/2" in printed
    assert "[red]x |" in printed
    assert "loss" in printed


def test_what_others_print_stands_above_the_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    bar = progress.Bar("mine", 3, terminal)
    bar.show("training", 1)
    print("from a user's own function")
    print("a note", file=sys.stderr)
    bar.close()
    assert sys.stdout is terminal
    assert "\r \rfrom a user's own function\n" in re.sub(" +", " ", terminal.getvalue())
    assert "a note" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_the_bar_shows_the_elapsed_time_at_any_width(tmp_path, width, monkeypatch):
    """Only the text at the end of the line is cut."""
    monkeypatch.setattr(progress, "_columns", lambda file: width)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with console.screen("a name", "", 100, tmp_path / "metrics.jsonl") as screen:
        screen(Phase("evaluating", 34, 100))
        screen.on_round({"round": 34, "train_loss": 0.1234, "headline": "a", "test_a": 0.9})
        screen(Phase("training", 35, 100, seconds_left=185.0))
    text = terminal.getvalue().rstrip("\n").rpartition("\r")[2]
    for part in ("a name", "34/100 [00:0", "3 min 05 s left"):
        assert part in text
    assert ("training round 35 of 100" in text) == (width > 80)
    assert len(text) <= width


def test_a_long_phase_is_printed_repeatedly(tmp_path, capsys, monkeypatch):
    """The repetition ends with the run."""
    monkeypatch.setattr(progress, "SECONDS", 0.1)
    with console.screen("mine", "", 3, tmp_path / "metrics.jsonl") as screen:
        screen(Phase("compiling", 1, 3, details={"program": "round"}))
        screen(Phase("training", 1, 3))
        repeats, end = [], time.monotonic() + 30
        while len(repeats) < 2 and time.monotonic() < end:
            time.sleep(0.05)
            lines = capsys.readouterr().out.splitlines()
            repeats += [line for line in lines if line.endswith(" s")]
        assert screen._output._pause >= 0.4  # it was doubled twice
    assert len(repeats) >= 2
    capsys.readouterr()
    assert repeats[0].startswith("mine  compiling (round), then training round 1 of 3, ")
    time.sleep(0.2)
    assert capsys.readouterr().out == ""


def test_bytes_include_the_rounds_before_a_resume(tmp_path, capsys):
    """Rows after the checkpoint do not count, because these rounds run again."""
    row = {"bytes_up": 1_000_000, "bytes_down": 500_000}
    for number in range(4):
        append_metrics(tmp_path / "metrics.jsonl", {"round": number, **row})
    with console.screen("mine", "", 3, tmp_path / "metrics.jsonl") as screen:
        screen.on_round({"round": 2, **row})
        screen.on_round({"round": 3, **row})
    assert capsys.readouterr().out == "mine  round 2/3  4.5 MB sent\nmine  round 3/3  6.0 MB sent\n"


def test_a_dry_run_writes_nothing(project, tmp_path, capsys, monkeypatch):
    """It prints the complete config and the banner, and compiles no program."""
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in project.iterdir()}
    assert cli.main(["run", str(project / "config.toml"), "--dry-run", "seed=7"]) == 0
    printed = capsys.readouterr().out
    assert "\nseed = 7\n" in printed
    assert "\n[optimizer]\n" in printed
    assert "config: fedavg over lora on model, data by dirichlet, 2 rounds" in printed
    assert "compiling" not in printed
    assert not any(tmp_path.iterdir())
    assert {path.name for path in project.iterdir()} == before


def test_a_file_or_a_pipe_has_room_for_all_columns(monkeypatch):
    assert results._console().width > 1000
    monkeypatch.setenv("COLUMNS", "90")
    assert results._console().width == 90


def test_no_bar_of_tokenizing_is_written_to_a_file_or_a_pipe(capsys, monkeypatch):
    clock = iter(range(0, 10**6, 10))  # every look at it is ten seconds later
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    for redrawn in (False, True):
        monkeypatch.setattr(text, "redraws", lambda redrawn=redrawn: redrawn)
        assert len([*text.batches(["a"] * 9000)]) > 1
        assert ("tokenizing" in capsys.readouterr().err) == redrawn
