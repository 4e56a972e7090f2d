"""A wrong config is refused before data are tokenized and a model is loaded."""

import csv
import json

import pytest
from internals import config as configs
from internals import encoder_of, hub, sources
from refusals import refused
from small_config import small

import fedjax_peft as fp
from fedjax_peft import tasks, testing
from fedjax_peft.config import early

ROWS = [{"text": "w1 w2", "label": "good", "who": 1}, {"text": "w3", "label": "bad", "who": 2}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, and one table in each form."""
    import datasets

    root = tmp_path_factory.mktemp("early")
    testing.write_tiny_checkpoint(root / "model")
    with (root / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    datasets.Dataset.from_list(ROWS).to_parquet(root / "rows.parquet")
    return root


def resolved(folder, *overrides, file="rows.csv"):
    config = small(model={"name": str(folder / "model")}, data={"name": str(folder / file)})
    config = configs.override(config, "partition.clients=2")
    for override in overrides:
        config = configs.override(config, override)
    return configs.resolve(config)


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    """Fails the test if rows are read, or weights or a tokenizer loaded."""
    for module, name in ((sources, "read_tables"), (hub, "load_model"), (hub, "load_tokenizer")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("loaded"))


def test_a_pretrained_adapter_is_attached_with_the_labels_of_the_data(folder, monkeypatch):
    """Its head has a row for each of them, and no header names them."""
    monkeypatch.setattr(early.memory, "shapes", lambda *_: pytest.fail("attached"))
    early.check([resolved(folder, "peft={name='pretrained', adapter='adapter'}")])


@pytest.mark.parametrize("file", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_columns(folder, file):
    """The columns of a file are known from its start."""
    early.check([resolved(folder, file=file)])
    early.check([resolved(folder, "partition={name='natural', by='who'}", file=file)])
    for override, complaint in (
        ("data.columns={label='labl'}", "Did you mean 'label'"),
        ("data.columns={text='txt'}", "Did you mean 'text'"),
        ("partition={name='natural', by='whom'}", "no column 'whom' to partition by"),
        ("task=tagging", "no column 'tokens'"),
    ):
        with pytest.raises(fp.InputError, match=complaint):
            early.check([resolved(folder, file=file), resolved(folder, override, file=file)])


def test_a_first_row_may_lack_a_column_that_is_renamed(tmp_path):
    row = {"instruction": "w1", "output": "w2"}
    rows = [row, row, {**row, "ctx": "w3"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = sources.check_header(str(path), columns={"input": "ctx"})
    assert task.name == "instruction_tuning"
    with pytest.raises(fp.InputError, match="no column 'cxt', only: instruction, output, ctx"):
        sources.check_header(str(path), columns={"input": "cxt"})


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("peft.targets=['querry']", "Did you mean 'query'"),
        ("peft.rank=33", "above the smaller side"),
        ("peft.rank=0", "'rank' cannot be 0"),
        ("model.name=/nowhere", "no model directory"),
        ("data.name=/nowhere.csv", "neither a named data set"),
        ("algorithm={name='fedprox', mu=-1.0}", "'mu' cannot be -1.0"),
        ("optimizer.learning_rate=-1.0", "learning_rate"),
        ("rounds=-3", "rounds = -3"),
        ("seed=-1", "seed = -1"),
        ("clients_per_round=0", "clients_per_round = 0"),
        ("local_steps=[8, 2]", "Write local_steps = "),
    ],
)
def test_model_and_algorithm(folder, override, complaint):
    """A target, a rank and an algorithm are known from the config and the model's shapes."""
    refused(complaint, lambda: early.check([resolved(folder, override)]))


@pytest.mark.parametrize("name", tasks.__all__)
def test_every_encoder_reads_a_header(tmp_path, name):
    """A header with all columns of a task passes; one without any does not, if rows do not tell."""
    task = getattr(tasks, name)()
    (tmp_path / "x.csv").write_text(",".join(encoder_of(task).columns))
    assert sources.check_header(str(tmp_path / "x.csv"), task=task) == task
    if name in ("question_answering", "instruction_tuning"):  # they read several forms
        return
    (tmp_path / "x.csv").write_text("one,two")
    refused("no column|no pairs", sources.check_header, str(tmp_path / "x.csv"), task=task)
