"""Every data set of the hub, by made-up rows in its columns (``experiments/datasets/hub.json``)."""

import json
import runpy
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pytest
from internals import DATASETS, Reading, assets, load_tables
from PIL import Image

import fedjax_peft as fp
from fedjax_peft import partition

FOLDER = Path(__file__).parents[2] / "experiments" / "datasets"
SCRIPT = runpy.run_path(str(FOLDER / "hub.py"))
KNOWN = json.loads((FOLDER / "hub.json").read_text())
ON_HUB = [name for name, entry in DATASETS.items() if entry.hub]
REVISIONS = {"wnut17": {"revision": "refs/convert/parquet"}}
TESTS = {
    **dict.fromkeys(("mrpc", "rte", "sst2", "qnli", "qqp", "squad", "oasst1"), "validation"),
    **dict.fromkeys(("20newsgroups", "semeval2010_task8", "wnut17", "gsm8k", "aya"), "test"),
    **dict.fromkeys(("cifar100", "cifar10", "fashion_mnist"), "test"),
    "mnli": "validation_matched",
}
"""The hub's split that is our ``test``; for the others, it is a share of ``train``."""
TEXTS = {"sentence1": "w1", "sentence2": "w2"}
CONTEXT = "w3 w4 w5"
SPANS = {"start": [0], "end": [1]}


def talk(prompt, completion):
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


ASKED = {"messages": talk("w1\n\nw2", "w3")}
INSTRUCTION = {"instruction": "w1", "input": "w2", "output": "w3"}
GREY, COLOUR = np.eye(28, dtype=np.uint8) * 200, np.full((32, 32, 3), (7, 8, 9), np.uint8)
ROWS = {
    "20newsgroups": (
        {"text": "w1", "label": 1, "label_text": "b"},
        {"text": "w1", "label": "b"},
        {"text": "", "label": 0, "label_text": "a"},
    ),
    "semeval2010_task8": ({"sentence": "w1", "relation": 18}, {"text": "w1", "label": "Other"}),
    "mrpc": (
        {**TEXTS, "label": 1},
        {"text": "w1", "text_pair": "w2", "label": "equivalent"},
    ),
    "rte": ({**TEXTS, "label": 0}, {"text": "w1", "text_pair": "w2", "label": "entailment"}),
    "sst2": ({"sentence": "w1", "label": 1}, {"text": "w1", "label": "positive"}),
    "qnli": (
        {"question": "w1", "sentence": "w2", "label": 1},
        {"text": "w1", "text_pair": "w2", "label": "not_entailment"},
    ),
    "qqp": (
        {"question1": "w1", "question2": "w2", "label": 1},
        {"text": "w1", "text_pair": "w2", "label": "duplicate"},
    ),
    "mnli": (
        {"premise": "w1", "hypothesis": "w2", "label": 2},
        {"text": "w1", "text_pair": "w2", "label": "contradiction"},
    ),
    "wnut17": (
        {"id": "0", "tokens": ["w1", "w2"], "ner_tags": [9, 0]},
        {"tokens": ["w1", "w2"], "tags": ["B-person", "O"]},
    ),
    "squad": (
        {"context": CONTEXT, "question": "w1", "answers": {"text": ["w4"], "answer_start": [3]}},
        {"context": CONTEXT, "question": "w1", "answers": ["w4"], "answer_starts": [3]},
        {
            **{"context": CONTEXT, "question": "w2"},
            "answers": {"text": ["w4", "w4", "w5"], "answer_start": [3, 3, 6]},
        },
    ),
    "mrqa": (
        {
            **{"subset": "NewsQA", "context": CONTEXT, "question": "w1", "answers": ["W3!"]},
            "detected_answers": {"text": ["w3"], "char_spans": [SPANS], "token_spans": [SPANS]},
        },
        {
            **{"source": "NewsQA", "context": CONTEXT, "question": "w1"},
            **{"answers": ["w3"], "answer_starts": [0]},
        },
    ),
    "shakespeare": (
        {"character_id": "THE_FOOL", "x": "w1 w2", "y": "?"},
        {"client": "THE_FOOL", "text": "w1 w2"},
    ),
    "alpaca": (
        {**INSTRUCTION, "text": "w9"},
        {**ASKED, "text": "w9"},
        {"instruction": "w1", "output": ""},
    ),
    "alpaca_gpt4": ({**INSTRUCTION, "text": "w9"}, {**ASKED, "text": "w9"}),
    "dolly": (
        {"instruction": "w1", "context": "w2", "response": "w3", "category": "open_qa"},
        {**ASKED, "category": "open_qa"},
        {"instruction": "w1", "context": "", "response": "w3", "category": "open_qa"},
    ),
    "oasst1": (
        {"text": "w1", "role": "prompter", "lang": "en", "user_id": "ana", "rank": None},
        {"messages": talk("w1", "w2"), "lang": "en", "author": "ana"},
        {"text": "w2", "role": "assistant", "lang": "en", "user_id": "bo", "rank": 0},
    ),
    "gsm8k": ({"question": "w1", "answer": "w2 #### 2"}, {"messages": talk("w1", "w2 #### 2")}),
    "metamath": (
        {"type": "GSM_SV", "query": "w1", "original_question": "w9", "response": "w2"},
        {"messages": talk("w1", "w2"), "type": "GSM_SV"},
    ),
    "code_alpaca": (INSTRUCTION, ASKED),
    "fingpt_sentiment": (INSTRUCTION, ASKED),
    "medical_flashcards": (
        {"input": "w1", "output": "w2", "instruction": "w9"},
        {"messages": talk("w1", "w2"), "instruction": "w9"},
    ),
    "aya": (
        {"inputs": "w1", "targets": "w2", "language": "English", "user_id": "8fe0"},
        {"messages": talk("w1", "w2"), "language": "English", "client": "8fe0"},
    ),
    "emnist": (
        {"image": GREY, "writer_id": "f0000_14", "character": 53},
        {"image": GREY, "client": "f0000_14", "label": "r"},
    ),
    "cifar100": (
        {"img": COLOUR, "fine_label": 26, "coarse_label": 13},
        {"image": COLOUR, "label": "crab"},
        {"img": COLOUR, "fine_label": 99, "coarse_label": 13},
    ),
    "cifar10": ({"img": COLOUR, "label": 9}, {"image": COLOUR, "label": "truck"}),
    "fashion_mnist": ({"image": GREY, "label": 0}, {"image": GREY, "label": "T - shirt / top"}),
}
"""Name -> a row of the hub, the same row of ours, and perhaps a second row of the hub."""
N = 10
IDS = {"squad": "id", "mrqa": "qid"}


def stand_in(name):
    """Returns a split of made-up rows with the columns and types of the hub."""
    features = datasets.Features.from_dict(KNOWN[name]["features"])
    first, _, *more = ROWS[name]
    rows = [(first, *more)[i % (1 + len(more))] for i in range(N)]
    columns = {
        column: [filled(row.get(column), feature) for row in rows]
        for column, feature in features.items()
    }
    if name in IDS:
        columns[IDS[name]] = [f"q{i}" for i in range(N)]
    if name == "oasst1":
        columns["message_id"] = [f"m{i}" for i in range(N)]
        columns["parent_id"] = [f"m{i - 1}" if i % 2 else None for i in range(N)]
    assert {*first} <= {*columns}
    return datasets.Dataset.from_dict(columns, features=features)


def filled(value, feature):
    """Returns a value of a row; an empty one of a column that nobody reads."""
    if isinstance(value, np.ndarray):
        return Image.fromarray(value)
    if value is not None or not isinstance(feature, datasets.Value):
        return value
    return {"string": "", "bool": False}.get(feature.dtype, 0)


@pytest.fixture
def hub(monkeypatch):
    """Puts stand-ins in the place of the hub, and returns the calls that reached it."""
    calls = []
    names = {(DATASETS[name].hub, DATASETS[name].config): name for name in ON_HUB}

    def from_hub(path, config, *, cache_dir, split=None, streaming=False, **revision):
        assert cache_dir.startswith(str(assets.cache_dir()))
        name = names[path, config]
        assert revision == REVISIONS.get(name, {})
        if streaming:
            rows = stand_in(name).to_iterable_dataset()
            return datasets.IterableDatasetDict(dict.fromkeys(KNOWN[name]["splits"], rows))
        assert split in KNOWN[name]["splits"]
        calls.append(split)
        return stand_in(name)

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    return calls


def test_every_data_set_of_the_hub_has_rows():
    assert ROWS.keys() == {*ON_HUB}
    SCRIPT["check"]()


@pytest.mark.parametrize("name", ON_HUB)
def test_rows_of_the_hub(hub, name):
    entry = DATASETS[name]
    _, tables = load_tables(name, Reading(source="hub"))
    more = ["validation"] if name == "wnut17" else []
    assert hub == ["train", *([TESTS[name]] if name in TESTS else []), *more]
    assert tables.keys() == {"train", "test", *more}
    columns = dict(tables["train"].columns)
    if name in IDS:
        assert columns.pop("id")[0][0] == "q"
    ours = ROWS[name][1]
    assert columns.keys() == ours.keys()
    for column, value in ours.items():
        assert np.array_equal(columns[column][0], value), (column, columns[column][0])
    assert all(len(table) for table in tables.values())
    assert entry.keys.keys() <= columns.keys()


@pytest.mark.parametrize("name", ["mrqa", "emnist", "oasst1", "wnut17", "squad", "shakespeare"])
def test_columns_of_the_hub_are_read_at_once(hub, monkeypatch, name):
    """One by one, a share of 100,000 rows of MRQA took 200 seconds in place of 12."""
    read, calls = datasets.arrow_dataset.format_table, []
    monkeypatch.setitem(stand_in.__globals__, "N", 200)
    monkeypatch.setattr(
        datasets.arrow_dataset, "format_table", lambda *x, **y: calls.append(1) or read(*x, **y)
    )
    _, tables = load_tables(name, Reading(source="hub"))
    assert len(tables["train"]) >= 100
    assert len(calls) < 50


@pytest.mark.parametrize("name", ON_HUB)
def test_rows_of_the_hub_become_clients_with_its_classes(hub, stand_in_tokenizer, name):
    entry = DATASETS[name]
    talks = "messages" in fp.tasks.find(entry.task)().encoder.columns
    template = {"template": "{prompt} "} if talks else {}
    data = fp.load_dataset(name, tokenizer=stand_in_tokenizer, source="hub", **template)
    train = data["train"]
    kinds = KNOWN[name]["features"].items()
    label = next((column for column, kind in kinds if classes(kind)), None)
    if label is not None:
        there = classes(KNOWN[name]["features"][label])
        assert train.label_names == tuple("crab" if one == "cra" else one for one in there)
        found = np.atleast_1d(train.columns["labels"][0])
        assert found[found >= 0].tolist() == np.atleast_1d(ROWS[name][0][label]).tolist()
    assert entry.keys.keys() <= train.meta.keys()
    by = next(iter(entry.keys), None)
    one = partition.natural(train, by=by) if by else partition.iid(train, clients=2, seed=0)
    assert one.sizes.sum() == len(train)


def test_the_six_tasks_of_the_hub_become_clients(hub, stand_in_tokenizer):
    data = fp.load_dataset("glue_silo", tokenizer=stand_in_tokenizer, source="hub")["train"]
    assert set(data.meta["task"]) == {*DATASETS["glue_silo"].parts}
    assert len(partition.natural(data, by="task")) == 6


def classes(kind):
    """Returns the names of the classes of a column, none if it has no classes."""
    return kind.get("feature", kind).get("names", ())


LAYOUTS = {
    "wnut17": "wnut_17/{split}/0000.parquet",
    "20newsgroups": "{split}.jsonl",
    "shakespeare": "shakespeare.csv",
}
"""Repositories whose splits ``datasets`` infers from the names of their files."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_splits_are_found_in_the_files_of_a_repository(tmp_path, monkeypatch, name):
    place, real = tmp_path / "there", datasets.load_dataset
    for split in KNOWN[name]["splits"]:
        path = place / LAYOUTS[name].format(split=split)
        path.parent.mkdir(parents=True, exist_ok=True)
        write = {".parquet": "to_parquet", ".jsonl": "to_json", ".csv": "to_csv"}[path.suffix]
        getattr(stand_in(name), write)(path)

    def local(_path, config, *, split, cache_dir, revision=None):
        return real(str(place), config, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", local)
    _, tables = load_tables(name, Reading(source="hub"))
    rows = {split: len(table) for split, table in tables.items()}
    assert rows == ({"train": 8, "test": 2} if name == "shakespeare" else dict.fromkeys(rows, N))
    for column, value in ROWS[name][1].items():
        assert tables["train"].columns[column][0] == value


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """Returns copies of the list and of the page, which the script changes."""
    places = tmp_path / "hub.json", tmp_path / "data.md"
    for place, name in zip(places, ("LIST", "PAGE"), strict=True):
        place.write_text(SCRIPT[name].read_text())
        monkeypatch.setitem(SCRIPT["main"].__globals__, name, place)
    return places


def known_to(listed):
    return json.loads(listed[0].read_text())


def test_the_script_keeps_what_it_reads(hub, listed, monkeypatch, capsys):
    def info(_api, name, revision=None):
        kind = huggingface_hub.hf_api.DatasetInfo
        return kind(id="new/gsm8k" if name == "openai/gsm8k" else name, sha=f"{revision}" * 40)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    SCRIPT["main"]([])
    after = known_to(listed)
    today = {after[name]["read"] for name in ON_HUB}
    assert len(today) == 1
    assert None not in today
    assert after["wnut17"]["commit"].startswith("refs/convert/parquet")
    for name in DATASETS:
        assert after[name]["features"] == KNOWN[name]["features"]
        assert after[name]["splits"].keys() == KNOWN[name]["splits"].keys()
        assert after[name]["files"] == KNOWN[name]["files"]
    assert "openai/gsm8k is called new/gsm8k now" in capsys.readouterr().out
    assert listed[1].read_text().count(today.pop()) >= len(ON_HUB)
    SCRIPT["check"]()


def test_without_a_connection_nothing_changes(hub, listed, monkeypatch):
    def offline(*_args, **_options):
        raise ConnectionError("no route")

    before = [place.read_bytes() for place in listed]
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    with pytest.raises(SystemExit, match=r"hub cannot be reached \(ConnectionError: no route\)\.$"):
        SCRIPT["main"]([])
    assert [place.read_bytes() for place in listed] == before


def test_what_cannot_be_read_keeps_its_place(hub, listed, monkeypatch):
    def info(_api, name, revision=None):
        if "squad" in name:
            raise ValueError("moved away")
        return huggingface_hub.hf_api.DatasetInfo(id=name, sha="ab" * 20)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    with pytest.raises(SystemExit, match=r"left as they were: squad\.$"):
        SCRIPT["main"](["squad", "sst2"])
    after = known_to(listed)
    assert after["squad"] == KNOWN["squad"]
    assert after["sst2"]["commit"] == "ab" * 20
    SCRIPT["check"]()


def test_files_are_read_as_the_library_reads_them(listed, tmp_path):
    (tmp_path / "rte").mkdir()
    for split in ("train", "validation"):
        stand_in("rte").to_parquet(tmp_path / "rte" / f"{split}.parquet")
    SCRIPT["main"](["--files", str(tmp_path)])
    after = known_to(listed)
    assert after["rte"]["files"]["rows"] == {"train": N, "test": N}
    assert {name: x for name, x in after.items() if name != "rte"} == {
        name: x for name, x in KNOWN.items() if name != "rte"
    }
