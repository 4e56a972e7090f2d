"""A task is one file: its name stands there only, and a task of the user needs nothing else."""

import ast
import csv
import functools
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from internals import TEXT, cli, read_metrics
from refusals import refused
from shallow import simple_encoder  # noqa: F401

import fedjax_peft
import fedjax_peft as fp
from fedjax_peft import tasks, testing

pytestmark = pytest.mark.slow

ROOT = Path(fedjax_peft.__file__).parent
PAGE = ROOT.parent / "docs" / "howto" / "own-task.md"


@functools.cache
def strings(path):
    """Returns the string constants of a module, docstrings apart."""
    tree = ast.parse(path.read_text())
    bare = {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    return {
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and n not in bare
    }


# "classification" is also the name of a kind of head.
@pytest.mark.parametrize("name", sorted({*tasks.__all__} - {"classification"}))
@pytest.mark.sample("next_token", "tagging", "question_answering")
def test_the_name_of_a_task_stands_in_its_file_only(name):
    homes = {ROOT / "tasks" / f"{name}.py", ROOT / "tasks" / "__init__.py"}
    assert homes <= {*ROOT.rglob("*.py")}
    found = {path for path in ROOT.rglob("*.py") if name in strings(path)}
    assert found - {ROOT / "data" / "catalog.py"} == homes, "the catalogue names tasks"


@pytest.mark.parametrize("name", tasks.__all__)
def test_a_listed_task_is_complete(name):
    """A new task is covered by being listed."""
    task = getattr(tasks, name)()
    assert task.name == name
    assert task == getattr(tasks, name)(), "its compiled programs are found again"
    assert hash(task) == hash(getattr(tasks, name)())
    assert repr(task) == f"Task({name!r})"
    assert isinstance(task, fp.contracts.Task)
    assert task.encoder is not None
    assert task.encoder.stand_in is not None
    assert tasks.for_head(task.head).head == task.head == tasks.head_kind(name)
    assert tasks.find(name) is getattr(tasks, name)
    assert tasks.for_data(fp.Dataset({"x": np.zeros(1)}, task=name)) == task
    assert tasks.for_data(fp.Dataset({"x": np.zeros(1)}, task=task)) is task


def test_tasks_of_columns_and_names():
    columns = {"tokens", "tags", "question", "context"}
    with pytest.raises(
        fp.InputError, match=r"x\.csv fit several tasks: question_answering and tagg"
    ):
        tasks.for_columns(columns, "x.csv")
    assert tasks.for_columns({"text", "stars"}, "x.csv").name == "next_token"
    assert tasks.for_columns({"stars"}, "x.csv").name == "classification"
    both = {"text", "question", "context"}  # two columns count for more than one
    assert tasks.for_columns(both, "x.csv").name == "question_answering"
    refused(r"no task 'taging'\. Did you mean 'tagging'", tasks.find, "taging")


# ------------------------------------------------------------------- the page on writing a task


def block(language):
    """Returns the last block of the page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)[-1]


@pytest.fixture(scope="module")
def run(simple_encoder, tmp_path_factory):  # noqa: F811
    """A run of the page's config with its task, in a folder that has nothing else."""
    folder = tmp_path_factory.mktemp("rating")
    testing.write_tiny_checkpoint(folder / "model")
    (folder / "rating.py").write_text(block("python"))
    with (folder / "reviews.csv").open("w", newline="") as file:
        rows = [(f"w{i} w{i % 7} w{i % 3}", i % 5 + 0.5) for i in range(40)]
        csv.writer(file).writerows([("review", "stars"), *rows])
    config = block("toml").replace('"minilm-l6"', f'"{folder}/model"')
    (folder / "config.toml").write_text(config.replace("rounds    = 2", "rounds = 1"))
    out = folder / "runs" / "rating"
    assert cli.main(["run", str(folder / "config.toml"), "--out", str(out)]) == 0
    return out


def test_a_task_of_the_users_own_is_trained_scored_and_reported(run, capsys):
    rows = read_metrics(run / "metrics.jsonl")
    last = rows[-1]
    assert last["headline"] == "absolute_error"
    assert last["headline_better"] == "lower"
    assert last["train_loss"] != 0
    assert 0 < last["test_absolute_error"] <= last["test_rmse"] < 10
    assert cli.main(["report", str(run)]) == 0
    assert "absolute_error" in capsys.readouterr().out.replace(" ", "_")


def test_its_run_predicts(run, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "w1 w2"}\n{"text": "w3"}\n')
    arguments = ["predict", str(run), "--input", str(source), "--output", str(target)]
    assert cli.main(arguments) == 0
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer.keys() for answer in answers] == [{"rating"}] * 2
    assert all(np.isfinite(answer["rating"]) for answer in answers)
    source.write_text('{"note": "w1 w2"}\n')
    assert cli.main(arguments) == 2
    assert "in.jsonl" in capsys.readouterr().err


def test_a_task_for_arrays_needs_a_loss_and_metrics_only():
    def loss(outputs, batch):
        return jnp.sum(outputs.logits), jnp.float32(1)

    task = tasks.Task(loss, lambda outputs, batch: {"loss": loss(outputs, batch)})
    assert task.metrics(fp.contracts.Outputs(jnp.ones(2), jnp.zeros(0)), {})["loss"][0] == 2
    with pytest.raises(fp.InputError, match=r"task 'own' has no encoder, .* Task\(encoder="):
        fedjax_peft.load_dataset("sst2", source="tiny", task=task)


def test_a_task_may_read_a_named_data_set():
    """With the library's encoder, under another name: the data carry the task."""
    task = tasks.classification()._replace(name="mine", encoder=TEXT._replace(needs_tokenizer=True))
    refused("need a tokenizer", fedjax_peft.load_dataset, "sst2", source="tiny", task=task)
