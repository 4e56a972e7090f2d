"""Instruction data in a config: own rows, template, packing, requests made of labelled data."""

import json
import tomllib

import pytest
from internals import config as configs
from refusals import refused
from small_config import small

import fedjax_peft as fp
from fedjax_peft import tasks

SGD = {"name": "sgd", "learning_rate": 0.1}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("instructions")
    fp.testing.write_tiny_language_model(folder / "lm", num_hidden_layers=1)
    answers = {"yes": "a", "no": "b", "up": "c"}
    rows = [
        {"instruction": f"Say {word}", "output": word, "category": category}
        for _ in range(10)
        for word, category in answers.items()
    ]
    (folder / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def config(files, data, **more):
    tables = {"batch_size": 4, "model": str(files / "lm"), "data": data}
    tables |= {"peft": {"name": "lora", "rank": 2}, "optimizer": SGD}
    return small(**tables | {"partition": {"name": "natural", "by": "category"}, **more})


@pytest.mark.slow
def test_a_run_records_the_task_of_its_rows(files, tmp_path):
    data = {"name": str(files / "own.jsonl"), "max_length": 60, "packing": 120}
    raw = config(files, data | {"template": "{prompt} "}, evaluation={"client_holdout": 0.25})
    resolved = configs.resolve(raw)
    run = configs.run(resolved, out=tmp_path / "run")
    assert run.metrics[-1]["client_perplexity_mean"] > 1, run.metrics[-1]
    recorded = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert recorded["task"]["name"] == "instruction_tuning"
    assert recorded["data"]["packing"] == 120
    again = configs.resolve_recorded(recorded)
    task = configs.task_of(again)
    assert task.encoder.encode.keywords == {"template": "{prompt} "}
    assert task.encoder == configs.load_data(again)["train"].task.encoder


def test_packing_comes_after_what_clients_hold_out(files):
    data = {"name": str(files / "own.jsonl"), "max_length": 60, "packing": 120}
    resolved = configs.resolve(config(files, data, evaluation={"client_holdout": 0.25}))
    splits, clients = configs.federation(resolved)
    assert "segment_ids" not in clients.data.columns
    packed, evaluated = configs.evaluation_data(resolved, splits, clients)
    assert "segment_ids" in packed.data.columns
    assert "prompt_ids" in evaluated["client_test"].data.columns
    assert packed.weights.sum() + evaluated["client_test"].sizes.sum() == len(splits["train"])


def test_rows_whose_roles_do_not_alternate_by_a_key(files):
    ask, say = ({"role": role, "content": "w1"} for role in ("user", "assistant"))
    rows = [[ask, say]] * 20 + [[ask, ask, say]]
    text = "".join(f"{json.dumps({'messages': row, 'category': 'x'})}\n" for row in rows)
    (files / "uneven.jsonl").write_text(text)
    data = {"name": str(files / "uneven.jsonl"), "max_length": 60}
    refused("Row 21 of", configs.load_data, configs.resolve(config(files, data)))
    for turns, left in (("skip", 20), ("join", 21)):
        resolved = configs.resolve(config(files, data | {"turns": turns}))
        with pytest.warns(UserWarning, match="1 of 21 conversations"):
            splits = configs.load_data(resolved)
        assert sum(map(len, splits.values())) == left
        assert "1 of 21 conversations" in splits["train"].notes[0]
    with pytest.raises(fp.InputError, match=r"turns.*skip"):
        configs.load_data(configs.resolve(config(files, data | {"turns": "merge"})))


def test_labelled_data_become_requests(files):
    data = {"name": "sst2", "source": "tiny", "instructions": True, "template": "chat"}
    task = {"name": "instruction_tuning", "metric": "exact_match", "max_new_tokens": 3}
    resolved = configs.resolve(
        config(files, data, task=task, partition={"name": "natural", "by": "label"})
    )
    splits, clients = configs.federation(resolved)
    assert clients.names == ("negative", "positive")
    assert splits["train"].task.headline == "exact_match"
    assert splits["train"].references[0] in (("negative",), ("positive",))


def test_other_tasks_cannot_have_instructions(files):
    data = {"name": "sst2", "source": "tiny", "instructions": True}
    wrong = configs.resolve(config(files, data, task="next_token"))
    refused("is for instruction_tuning, and the task is 'next_token'", configs.load_data, wrong)
    assert tasks.for_head("causal_lm").name == "next_token"
