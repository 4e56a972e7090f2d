"""The command line, end to end, with a tiny checkpoint and tiny texts."""

import argparse
import importlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from closeness import approx
from internals import DATASETS, assets, build_parser, cli, config, load_run, make_study
from safetensors.numpy import load_file
from shallow import draw_nothing, simplify
from tiny_project import fails, rows

from fedjax_peft import __version__, algorithms
from fedjax_peft.cli import process
from fedjax_peft.cli.results import print_study
from fedjax_peft.cli.running import next_commands
from fedjax_peft.config import running

pytestmark = pytest.mark.slow

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CONFIGS = sorted({*EXPERIMENTS.rglob("*.toml")} - {*EXPERIMENTS.glob("*.toml")})  # of its folders
CONFIGS.append(Path(cli.__file__).with_name("demo.toml"))


def test_run_writes_a_complete_directory(finished):
    """It contains config, environment, metrics, checkpoints and parameters."""
    names = {p.name for p in finished.iterdir()}
    assert names >= {
        *("config.toml", "environment.json", "metrics.jsonl"),
        *("checkpoints", "params.safetensors"),
    }
    assert [row["round"] for row in rows(finished)] == [0, 1, 2]
    assert json.loads((finished / "environment.json").read_text())["versions"]["jax"]
    recorded = config.load(finished / "config.toml")
    assert recorded["local_steps"] == 2
    assert "epochs" not in recorded, "local steps count in their place"


def test_the_recorded_config_reproduces_the_run(finished, project):
    """The recorded config is complete and resolves to itself."""
    again = project / "again"
    assert cli.main(["run", str(finished / "config.toml"), "--out", str(again)]) == 0
    first, second = (load_file(run / "params.safetensors") for run in (finished, again))
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
    assert (again / "config.toml").read_text() == (finished / "config.toml").read_text()


def test_a_config_with_several_methods(project, capsys, monkeypatch):
    """Each [methods.NAME] table is a run; overrides apply to all of them; data are read once."""
    simplify(monkeypatch)
    read, load_data = [], running.load_data
    monkeypatch.setattr(running, "load_data", lambda given: read.append(1) or load_data(given))
    path = project / "both.toml"
    path.write_text(
        (project / "config.toml").read_text().replace("rank = 2", 'name = "head_only"')
        + '\n[methods.mean]\nname = "Mean"\n[methods.median]\naggregator.name = "median"\n'
    )
    out = project / "both"
    words = ["rounds=1", "local_steps=1", "seed=3", "--out", str(out)]
    assert cli.main(["run", str(path), *words]) == 0
    assert len(read) == 1
    printed = capsys.readouterr().out
    assert "Mean  round 1/1" in printed
    assert "median  round 1/1" in printed
    assert f"Next:\n  fedjax-peft report {out}  #" in printed
    assert "of the aggregated LoRA" not in printed, "explanations are for terminals"
    assert (out / "mean" / "metrics.jsonl").exists()
    assert cli.main(["report", str(out)]) == 0, "report accepts a folder of runs"
    assert (out / "report.html").exists()
    assert "seed = 3" in (out / "median" / "config.toml").read_text()


def test_the_next_commands_work(finished, tmp_path, monkeypatch, capsys):
    """Those that a run prints at its end: a report, predictions and an export."""
    draw_nothing(monkeypatch)
    monkeypatch.chdir(tmp_path)
    record = load_run(finished)
    lines = [line.partition("  #")[0].split()[1:] for line in next_commands(record, finished)]
    texts = [{"text": "w9 w10 w11"}, {"text": ""}, {"text": "w40 " * 50}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
    lines[-1][-1] = "adapter"
    for line in lines:
        assert cli.main(line) == 0
    assert "run" in capsys.readouterr().out
    assert (finished / "report.html").read_text().startswith("<!")
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 3
    for answer in answers:
        assert answer["label"] == f"class {int(np.argmax(answer['logits']))}"
    # A run with private leaves needs a client.
    private = record._replace(rows=[{**record.rows[0], "roles": {"private": 2}}])
    assert sum(" --client 0 " in line for line in next_commands(private, finished)) == 2
    prefix = {**record.config, "peft": {"name": "prefix_tuning"}}
    assert len(next_commands(record._replace(config=prefix), finished)) == 2, "has no format"


def test_columns_are_explained_on_a_terminal(finished, capsys, monkeypatch):
    """Each column whose heading is short has a sentence."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    print_study(make_study([load_run(finished)]))
    printed = capsys.readouterr().out
    assert "Agg. err. %: distance" in printed
    assert re.search(r"Sim\. \w+: by the time model", printed)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2 is not JSON"),
        ('{"txt": "w1"}', 'line 2 is not a JSON object with a string "text"'),
        ('{"text": "w1", "text_pair": "w2"}', "line 2: either all lines or none must have"),
        ('["w1"]', "line 2 is not a JSON object"),
    ],
)
def test_predict_names_the_invalid_line(finished, tmp_path, capsys, line, complaint):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "w1"}\n' + line + "\n")
    error = fails(capsys, "predict", str(finished), "--input", str(source), "--output", str(target))
    assert complaint in error
    assert not target.exists()


def test_bench_prints_one_json_object(capsys, monkeypatch):
    simplify(monkeypatch)
    shape = ["layers=1", "hidden=16", "heads=2", "ffn=16", "vocab=32", "length=4", "batch=2"]
    more = ["clients=3", "steps=1", "rank=2", "lanes=2", "repeats=1", "dropout=0.0"]
    assert cli.main(["bench", *shape, *more, "--json"]) == 0
    captured = capsys.readouterr()
    assert "bench  timing round 1 of 1\n" in captured.err, "stdout has the result only"
    result = json.loads(captured.out)
    assert result.keys() >= {
        *("client_steps_per_s", "compile_s", "lanes", "slot_utilisation"),
        *("peak_memory_mb", "device"),
    }
    assert result["lanes"] == 2
    assert result["slot_utilisation"] == approx(3 / 4)


def test_list_and_assets(capsys):
    """``list`` is an overview of one screen, and its sections have every name of a config."""
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 100
    for line in lines[: lines.index("")]:
        assert cli.main(["list", line.split()[0]]) == 0
    printed = capsys.readouterr().out
    for name in ("minilm-l6", "20newsgroups", "lora", "mean", "fra", "iid", "pooled", "fedbf"):
        assert name in printed
    for name in algorithms.__all__:
        (line,) = [x for x in printed.splitlines() if x.split()[:1] == [name] and "  " in x][:1]
        assert len(line) > 30
    for name, source in DATASETS.items():  # each with the ways to get it
        _, own = printed.split(f"\n  {name} ", 1)
        assert own.lstrip().startswith(source.description)
        ways = [source.hub, source.download, *source.parts]
        assert all(text in own[:900] for text in ways if text), name
    assert cli.main(["list", "algorithm", "feddyn"]) == 0
    assert "Not with: aggregators that factor anew, asynchronous." in capsys.readouterr().out
    assert cli.main(["assets"]) == 0
    assert "not fetched" in capsys.readouterr().out


def test_doctor(capsys, monkeypatch, tmp_path):
    """The report has what a bug report needs, in one paragraph, and no other settings."""
    monkeypatch.setenv("FEDJAX_PEFT_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("SECRET", "hidden")
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for text in (__version__, "jax 0", "cpu", "memory", "disk", str(tmp_path / "none"), "GB free"):
        assert text in printed, text
    assert "FEDJAX_PEFT_CACHE" in printed
    assert "hidden" not in printed
    assert "\n\n" not in printed


def test_bad_asset(capsys, monkeypatch):
    """Errors: an unknown name, and a download with another checksum."""
    assert "minilm-l6" in fails(capsys, "assets", "minilm")
    monkeypatch.setattr(
        assets, "fetch", lambda name: (_ for _ in ()).throw(assets.InputError("checksum differs"))
    )
    assert "checksum differs" in fails(capsys, "assets", "minilm-l6")


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("rouds=3", "Did you mean 'rounds'"),
        ("peft.rnk=3", "Did you mean 'rank'"),
        ("mu=0.1", "Unknown config key 'mu'. Did you mean 'algorithm.mu'?"),
        ("lanes=2", "Unknown config key 'lanes'. Did you mean 'placement.lanes'?"),
        ("eval_every=3", "Unknown config key 'eval_every'. Did you mean 'evaluation.every'?"),
        ('system="federa"', r"\[system\] must be a table, not 'federa'"),
        ("wholly=3", "Unknown config key 'wholly'. Known: aggregator, algorithm"),
        ("partition.name=iid", "'alpha' of iid; it is one of dirichlet.*partition=iid drops"),
        ("seed=0..4", "Several values are for `fedjax-peft sweep`"),
        ("optimizer.learning_rate=1e-3,1e-2", "Several values are for `fedjax-peft sweep`"),
        ("peft.init=svg", "'svd', 'pissa', 'milora', 'qr', 'loftq' or 'eva'"),
        ("peft.name=lara", "Did you mean 'lora'"),
        ("algorithm.name=fedavgg", "Did you mean 'fedavg'"),
        ("rounds=0", "rounds = 0 must be a positive whole number"),
        ("rounds=two", "'rounds' cannot be 'two'"),
        ("clients_per_round=7", "more than the 6 clients"),
        ("partition.clients=81", "80"),
        ("partition.alpha=0", "alpha"),
        ("data.name=newsgroups", "20newsgroups"),
        ("placement.lanes=0", "lanes = 0"),
        ("optimizer.learning_rate='fast'", "learning_rate"),
        ("algorithm.name=fedmcp", r"dual\(\)"),
        ("aggregator.name=fra peft={name='opendelta',size=2}", "'fra'.*LoRA"),
        ("algorithm.name=ffa peft={name='bitfit'}", "LoRA.*'fedavg'"),
        ("algorithm.name=fedex system.client_ranks=[1,2]", "'fedex'.*flora"),
        ("sampling=poison", "poisson"),
        ("system.failure_rate=1.5", "failure_rate"),
        ("evaluation.diagnostics=['drift']", "variation"),
        ("evaluation.diagnostics=['cka']", r"dual\(\)"),
    ],
)
def test_bad_config(project, capsys, override, complaint):
    """The error is one paragraph, the exit code is 2, and no run directory is created."""
    out = project / "bad"
    words = [str(project / "config.toml"), *override.split(), "--out", str(out)]
    assert re.search(complaint, fails(capsys, "run", *words))
    assert not out.exists()


@pytest.mark.parametrize("word", ["--nonsense", "nonsense"])
def test_unknown_words(project, capsys, word):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["run", str(project / "config.toml"), "rounds=1", "--resume", word])
    assert exit_.value.code == 2
    assert word in capsys.readouterr().err


def test_existing_run_is_safe(finished, capsys):
    config = str(finished / "config.toml")
    before = (finished / "metrics.jsonl").read_bytes()
    assert "--resume" in fails(capsys, "run", config, "--out", str(finished))
    error = fails(
        capsys, "run", config, "--out", str(finished), "--resume", "peft.rank=1", "seed=9"
    )
    assert "peft.rank: 2 -> 1" in error
    assert "seed: 0 -> 9" in error
    words = (config, "--out", str(finished), "--overwrite", "clients_per_round=7")
    assert "more than the 6 clients" in fails(capsys, "run", *words)
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_overwrite_removes_only_runs(project, tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("keep")
    config = str(project / "config.toml")
    fails(capsys, "run", config, "--out", str(tmp_path), "--overwrite")
    assert (tmp_path / "precious.txt").read_text() == "keep"


def test_output_paths_are_checked_before_the_work(finished, tmp_path, capsys, monkeypatch):
    draw_nothing(monkeypatch)
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "w1"}')
    (tmp_path / "file").write_text("")
    for place in (
        tmp_path,
        source,
        tmp_path / "file" / "x",
        tmp_path / "none" / "x",
        tmp_path / ("x" * 300),
    ):
        error = fails(
            capsys, "predict", str(finished), "--input", str(source), "--output", str(place)
        )
        assert str(place)[:60] in error
    assert source.read_text() == '{"text": "w1"}'
    error = fails(capsys, "report", str(finished), "--out", str(tmp_path / "file"))
    assert "cannot be written" in error
    for endless in ("/dev/zero", "/dev/full"):
        assert "is a device" in fails(capsys, "run", endless)


def test_reports_and_predictions_need_a_run(tmp_path, capsys):
    assert str(tmp_path) in fails(capsys, "report", str(tmp_path))
    assert str(tmp_path) in fails(capsys, "export", str(tmp_path), "--out", str(tmp_path / "x"))


def test_the_directory_of_compiled_programs(monkeypatch):
    """The default is the package's cache directory; what the user has chosen takes precedence."""
    setting, options = "jax_compilation_cache_dir", SimpleNamespace(command="running.run")
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update(setting, None)
        process.prepare_jax(options)
        assert jax.config.jax_compilation_cache_dir is None, "the variable is JAX's own"
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
        process.prepare_jax(options)
        assert jax.config.jax_compilation_cache_dir == str(assets.cache_dir() / "xla")
        jax.config.update(setting, "elsewhere")
        process.prepare_jax(options)
        assert jax.config.jax_compilation_cache_dir == "elsewhere"
    finally:
        jax.config.update(setting, before)


def test_every_command_has_its_function():
    commands = next(x for x in build_parser()._actions if isinstance(x, argparse._SubParsersAction))
    assert len(commands.choices) > 15
    for parser in commands.choices.values():
        module, _, function = parser.get_default("command").partition(".")
        assert callable(getattr(importlib.import_module(f"fedjax_peft.cli.{module}"), function))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_experiment_configs_are_valid(path):
    for one in config.methods(config.load(path)).values():
        assert config.resolve(one)["rounds"] > 0


def test_overrides_apply_to_every_method():
    """Overrides replace the keys of a method's own table too, but not what it alone is given."""
    raw = {"rounds": 1, "methods": {"a": {"rounds": 2}, "b": {"peft": {"rank": 3}}}}
    given = ["methods.b.rounds=6", "rounds=5", "peft.rank=7", "methods.a.seed=4"]
    for texts in (given, given[::-1]):
        a, b = config.methods(raw, texts).values()
        assert a == {"name": "a", "rounds": 5, "seed": 4, "peft": {"rank": 7}}
        assert b == {"name": "b", "rounds": 6, "peft": {"rank": 7}}
    (a, _) = config.methods(raw, ["methods.a.rounds=", "rounds=5"]).values()
    assert a["rounds"] == 5


def test_epochs_replace_local_steps():
    """They would have no effect beside the ``local_steps`` of the file or of a preset."""
    raw = {"local_steps": 4, "methods": {"a": {}, "b": {"epochs": 5}}}
    a, b = config.methods(raw).values()
    assert (a["local_steps"], b) == (4, {"name": "b", "epochs": 5})
    a, b = config.methods(raw, ["epochs=3"]).values()
    assert (a, b) == ({"name": "a", "epochs": 3}, {"name": "b", "epochs": 3})
    assert config.methods({"epochs": 2}, ["local_steps=6"])[""] == {"epochs": 2, "local_steps": 6}


@pytest.mark.parametrize("text", ["data.name=none.csv", "model=./none", "data.source=none"])
def test_a_missing_path_of_an_override_names_both_places(
    project, tmp_path, monkeypatch, capsys, text
):
    """Files are looked for in the working directory and beside the config."""
    monkeypatch.chdir(tmp_path)
    error = fails(capsys, "run", str(project / "config.toml"), text, "--out", str(tmp_path / "out"))
    assert "none" in error
    assert error.endswith(f"Nor is it beside the config, in {project}.\n")
    monkeypatch.chdir(project)
    error = fails(capsys, "run", "config.toml", text, "--out", str(tmp_path / "out"))
    assert "beside" not in error


def test_a_path_of_an_override_is_found_beside_the_config(project, tmp_path, monkeypatch, capsys):
    """Also by commands that run nothing; a sweep keeps the whole path for its resume."""
    shutil.copytree(project / "data", project / "texts", dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    path = str(project / "config.toml")
    assert cli.main(["run", path, "data=texts", "data.max_length=12", "--dry-run"]) == 0
    assert f'name = "{project / "texts"}"' in capsys.readouterr().out
    assert cli.main(["partition", path, "data.name=texts", "--out", str(tmp_path / "p")]) == 0
    assert cli.main(["plan", path, "data.name=texts"]) == 0
    assert cli.main(["sweep", path, "data.name=texts", "seed=0,1", "--dry-run"]) == 0
