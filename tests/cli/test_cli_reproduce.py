"""``fedjax-peft reproduce``: it runs what a result of a paper needs, continues it, writes it."""

import pytest
from internals import cli, sweeping
from internals import config as configs
from shallow import simple_encoder  # noqa: F401
from tiny_project import CONFIG, fails, rows

from fedjax_peft import testing
from fedjax_peft.cli import reproduce, reproducible

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simple_encoder")]

LIST = """
[mine]
title = "Mine-LoRA"

[[mine.results]]
names = ["Table II", "Figure 3"]
what = "two seeds"
sweeps = ["one --only two", "one optimizer.learning_rate=0.1 --only two --out lower/two"]
minutes = 7
write = "write.py {sweeps} --below {runs} --out {out}"
files = ["table2"]

[[mine.results]]
names = ["Table 4"]
what = "without runs"
write = "write.py --out {out}"
files = ["table4"]

[[mine.results]]
names = ["extra"]
what = "for a CPU"
small = ["one"]
minutes = 1
write = "write.py --fail --out {out}"
files = ["extra"]
"""
HEAD = "# Hours of 2 runs: 1,000.5 to 2 on an H100, 3 to 4 on an A100 (experiments/hours.py).\n"
SCRIPT = """
import os, pathlib, sys
if "--fail" in sys.argv:
    raise ValueError("no luck")
print(sys.argv[1:], os.environ["JAX_PLATFORMS"], os.environ.get("FEDJAX_PEFT_DATA"))
import fedjax_peft
if sys.argv[1] != "--out":
    pathlib.Path(sys.argv[-1], "table2.md").write_text("a table")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a folder for a named data set."""
    root = tmp_path_factory.mktemp("data")
    testing.write_tiny_texts(root / "20newsgroups", train=80, test=40)
    return root


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, which holds the experiments of one paper."""
    text = CONFIG.replace("{root}/model", "no/such").replace("{root}/data", "20newsgroups")
    text += "[sweep.grid]\nseed = [0, 1]\n[methods.one]\npeft.rank = 1\n[methods.two]\n"
    for setting in ("paper", "small"):
        (tmp_path / "experiments" / "mine" / setting).mkdir(parents=True)
        (tmp_path / "experiments" / "mine" / setting / "one.toml").write_text(HEAD + text)
    (tmp_path / "experiments" / "mine" / "write.py").write_text(SCRIPT)
    (tmp_path / "experiments" / "reproduce.toml").write_text(LIST)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long("four runs of two sweeps, and a process")
def test_an_interrupted_command_continues_and_writes(place, project, data, monkeypatch, capsys):
    model, here = str(project / "model"), ["--data", str(data)]
    command = ["reproduce", "mine", "--small", "Table", "2", "rounds=1", "--model", model, *here]
    assert cli.main([*command, "--hours"]) == 0
    said = capsys.readouterr().out
    assert said.count("experiments/mine/small/one.toml: 2 runs, 0 finished") == 2
    assert "Minutes of all runs on one CPU core: 7, and compilation" in said
    assert "without your changes" in said
    assert "Results: runs/reproduce/mine/small/results" in said
    assert not (place / "runs").exists()

    run, calls = configs.run, []

    def interrupted(*words, **named):
        calls.append(named)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*words, **named)

    monkeypatch.setattr(configs, "run", interrupted)
    assert cli.main(command) == 130
    assert capsys.readouterr().err.endswith("interrupted. The same command continues\n")
    assert cli.main(["reproduce", "mine"]) == 0
    assert "small begun" in capsys.readouterr().out

    assert cli.main([*command, "-q"]) == 0
    said = capsys.readouterr().out
    assert "one.toml: 2 runs, 1 finished" in said
    out = place / "runs" / "reproduce" / "mine" / "small"
    folders = [out.relative_to(place) / name for name in ("one", "lower/two")]
    words = [*map(str, folders), "--below", str(folders[0].parent), "--out"]
    words.append(str(out.relative_to(place) / "results"))
    assert f"{words} cpu {data}" in said
    assert said.endswith("Written:\n  runs/reproduce/mine/small/results/table2.md\n")
    assert rows(out / "one/two/seed=1")[-1]["round"] == 1
    assert "learning_rate = 0.1\n" in (out / "lower/two/two/seed=0/config.toml").read_text()

    assert cli.main(["reproduce"]) == 0
    assert "small written" in capsys.readouterr().out
    error = fails(capsys, *command, "local_steps=1")
    assert "local_steps: 2 -> 1" in error, "nothing is mixed"


def test_the_list_has_names_times_and_contents(place, capsys):
    assert cli.main(["reproduce", "MINE_lora"]) == 0
    title, head, two, four, extra, *_ = capsys.readouterr().out.splitlines()
    assert title == "Mine-LoRA: fedjax-peft reproduce mine NAME [--small]"
    assert head.split() == ["NAME", "paper:", "hours", "small:", "minutes", "state"]
    assert two.split() == ["II,", "figure3", "at", "most", "2,000", "to", "4", "7", "two", "seeds"]
    assert four.split() == ["4", "computed", "computed", "without", "runs"]
    assert extra.split() == ["extra", "-", "1", "for", "a", "CPU"]


def test_the_papers_setting_is_the_default_and_asks_for_a_gpu(place, data, capsys):
    words = ["reproduce", "mine", "fig3", "--hours", "--data", str(data), "--out", "there"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "experiments/mine/paper/one.toml: 2 runs" in said
    assert "on an H100: at most 2,000 to 4\nThere is no accelerator here" in said
    assert said.endswith("Runs: there\nResults: there/results\n")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["min"], "There is no paper 'min' here. Did you mean 'mine'?"),
        (["mine", "figure33"], "no table or figure 'figure33' here. Did you mean 'figure3'?"),
        (["mine", "9"], "Known: 4, II, extra, figure3. `fedjax-peft reproduce mine` lists them"),
        (["mine", "extra"], "mine extra has no paper setting: add --small."),
        (["mine", "2", "--data", "experiments"], "--data experiments needs a folder 20newsgroups"),
        (["mine", "2", "wrong=1"], "wrong"),
        (["mine", "4"], "mine/write.py failed: it has written nothing."),
    ],
)
def test_what_is_wrong_is_named(place, capsys, monkeypatch, words, error):
    entry = reproduce.DATASETS["20newsgroups"]._replace(asset=None)
    monkeypatch.setattr(reproduce, "DATASETS", {"20newsgroups": entry})
    assert error in fails(capsys, "reproduce", *words)


def test_data_that_cannot_be_had_end_the_command_before_it_trains(place, project, capsys):
    words = ["mine", "2", "--model", str(project / "model"), "data.source=nowhere"]
    assert "nowhere" in fails(capsys, "reproduce", *words)
    assert not (place / "runs").exists()


def test_what_is_not_in_the_folder_is_left_out(place, data, capsys):
    file = place / "experiments" / "mine" / "small" / "one.toml"
    file.with_name("other.toml").write_text(file.read_text().replace("20newsgroups", "mrqa"))
    text = LIST.replace('["one"]', '["other", "one"]')
    (place / "experiments" / "reproduce.toml").write_text(text)
    words = ["reproduce", "mine", "extra", "--small", "--hours", "--data", str(data)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "small/one.toml: 4 runs" in said
    assert said.splitlines()[-1].startswith(f"Left out: --data {data} needs a folder mrqa with the")


def test_the_error_of_a_script_is_shown(place, capsys, monkeypatch):
    monkeypatch.setattr(sweeping, "sweep", lambda options: None)
    monkeypatch.setattr(configs, "federation", lambda config: None)
    error = fails(capsys, "reproduce", "mine", "extra", "--small")
    assert (
        "The runs are complete, but experiments/mine/write.py failed: ValueError: no luck" in error
    )


def test_the_folder_of_the_experiments_is_here_or_beside_the_package(place, monkeypatch, capsys):
    assert str(reproducible.experiments()) == "experiments"
    monkeypatch.chdir(place / "experiments")
    assert (reproducible.experiments() / "papers.md").exists(), "of the checkout"
    monkeypatch.setattr(reproducible, "__file__", str(place / "site" / "fedjax_peft" / "cli" / "x"))
    assert "needs the folder experiments/, which the wheel" in fails(capsys, "reproduce", "mine")


@pytest.mark.parametrize(
    ("name", "one"),
    [
        *[(name, "t4") for name in ("4", "IV", "iv", "T4", "Table 4", "table_iv", "tab. 4")],
        *[(name, "f12") for name in ("figure12", "F12", "Fig. 12", "FIGURE-12", "figures12")],
        *[(name, "e1") for name in ("equation1", "Eq. 1", "Equation 1")],
        *[(name, name) for name in ("exact", "private", "clients", "long")],
    ],
)
def test_names_have_several_spellings(name, one):
    assert reproducible.canonical(name) == one


@pytest.mark.parametrize(
    ("name", "folders", "found"),
    [
        ("sst2", ["sst2", "glue/sst2"], "sst2"),
        ("sst2", ["glue/sst2"], "glue/sst2"),
        ("glue_silo", ["glue/{}"], "glue"),
        ("glue_silo", ["{}"], ""),
        ("20newsgroups", ["20newsgroups"], "20newsgroups"),
        ("20newsgroups", [], None),
    ],
)
def test_a_data_set_is_found_in_the_folder_of_all(tmp_path, name, folders, found):
    for folder in folders:
        for part in reproduce.DATASETS["glue_silo"].parts:
            (tmp_path / folder.format(part)).mkdir(parents=True, exist_ok=True)
    made = reproduce._source({"data": {"name": name}}, tmp_path)
    assert made == ([] if found is None else [f'data.source="{tmp_path / found}"'])


def test_a_model_replaces_that_of_the_config_but_not_a_methods_own():
    assert reproduce._model({}, "m, n") == ['model.name="m, n"']
    own = {"model": {"name": "rnn"}}
    assert reproduce._model({"methods": {"a": {}, "b": {}}}, "m") == ['model.name="m"']
    assert reproduce._model({"methods": {"a": own, "b": {}}}, "m") == ['methods.b.model.name="m"']
    with pytest.raises(reproduce.InputError, match="a model of its own"):
        reproduce._model({"methods": {"a": own}}, "m")
