"""Every named data set is read from its original files; errors name the defects of such files."""

import gzip
import json
import struct

import datasets
import numpy as np
import pytest
from internals import Reading, load_tables
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.data.formats import tabular
from fedjax_peft.data.formats.files import find


def put(folder, **files):
    """Writes texts or bytes; in a name, ``__`` stands for the dot and ``_in_`` for a slash."""
    for name, content in files.items():
        *folders, name = name.replace("__", ".").split("_in_")
        path = folder.joinpath(*folders, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return folder


def tables(name, folder, **options):
    return load_tables(name, Reading(source=str(folder), **options))[1]


def columns(table):
    return {name: list(values) for name, values in table.columns.items()}


def test_files_in_subfolders_count_where_they_may(tmp_path):
    put(tmp_path, inner_in_train__tsv="")
    assert find(tmp_path, "train.tsv") == tmp_path / "inner" / "train.tsv"
    assert find(tmp_path, "train.tsv", deep=False) is None


# GLUE.

PAIR = "index\tsentence1\tsentence2\tlabel\n"


GLUE = {
    "rte": (PAIR, '0\tIt "rains.\tIt is wet.\tentailment', 'It "rains.|It is wet.|entailment'),
    "qnli": (
        "index\tquestion\tsentence\tlabel\n",
        "0\tWho?\tA cat.\tnot_entailment",
        "Who?|A cat.|not_entailment",
    ),
    "sst2": ("sentence\tlabel\n", "a dull\rday \t0", "a dull\rday ||negative"),
    "mrpc": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n",
        "1\t7\t8\tOne cat.\tA cat.",
        "One cat.|A cat.|equivalent",
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n",
        "1\t2\t3\tWhy?\tWhat for?\t1",
        "Why?|What for?|duplicate",
    ),
    "mnli": (
        "index\tpromptID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n",
        "0\t1p\tfiction\tIt rains.\tIt is dry.\tneutral\tcontradiction",
        "It rains.|It is dry.|contradiction",
    ),
}
"""Task -> header, a line, and its text, second text and label."""


@pytest.mark.parametrize("name", GLUE)
def test_glue(tmp_path, name):
    header, line, row = GLUE[name]
    dev = "dev_matched.tsv" if name == "mnli" else "dev.tsv"
    (tmp_path / "train.tsv").write_text(f"{header}{line}\r\n{line}\n", newline="")
    (tmp_path / dev).write_text(f"{header}{line}\n", newline="")
    found = tables(name, tmp_path)
    assert {part: len(table) for part, table in found.items()} == {"train": 2, "test": 1}
    for values in zip(*map(found["train"].columns.get, ("text", "label")), strict=True):
        assert values == (row.split("|")[0], row.split("|")[2])
    pairs = found["train"].columns.get("text_pair", [""])
    assert pairs[0] == row.split("|")[1]


def test_glue_oddities(tmp_path):
    header = "#1 ID\t#2 ID\t#1 String\t#2 String\tQuality"
    row = "1\t2\tOne.\tTwo.\t0"
    put(
        tmp_path / "mrpc",
        msr_paraphrase_train__txt=f"{header}\n{row}",
        msr_paraphrase_test__txt=f"{header}\n{row}",
    )
    assert tables("mrpc", tmp_path / "mrpc")["test"].columns["label"] == ["not_equivalent"]
    header = "question1\tquestion2\tis_duplicate\n"
    put(
        tmp_path / "qqp",
        train__tsv=f"{header}broken off\nA?\tB?\t0\n",
        dev__tsv=f"{header}A?\tB?\t1\n",
    )
    assert tables("qqp", tmp_path / "qqp")["train"].columns["text"] == ["A?"]
    header = "sentence1\tsentence2\tgold_label\n"
    dev = f"{header}A.\tB.\t-\nA.\tB.\tneutral\n"
    put(tmp_path / "mnli", train__tsv=f"{header}A.\tB.\tneutral\n", dev_matched__tsv=dev)
    test = tables("mnli", tmp_path / "mnli")["test"]
    assert list(test.row_numbers) == [3]  # the file's lines
    put(tmp_path / "mnli", train__tsv__gz="twice")
    refused(r"several files for one split: train\.tsv, train", tables, "mnli", tmp_path / "mnli")
    (tmp_path / "mnli" / "train.tsv").unlink()
    put(tmp_path / "mnli", train__tsv__gz=dev)
    assert tables("mnli", tmp_path / "mnli")["train"].columns["text"] == ["A."]


# Tables under the hub's names, or ours.


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("label", [1, "1", "not_entailment"])
def test_tables_of_either_name(tmp_path, ours, label):
    names = ("text", "text_pair") if ours else ("question", "sentence")
    row = json.dumps({**dict(zip(names, ("A?", "B."), strict=True)), "label": label, "idx": 3})
    put(tmp_path, train__jsonl=row, validation__jsonl__gz=row, test__jsonl="{broken")
    found = tables("qnli", tmp_path)
    assert columns(found["test"]) == {
        **{"text": ["A?"], "text_pair": ["B."], "label": ["not_entailment"]},
        "idx": [3],
    }


def test_texts_of_csv_may_be_long(tmp_path):
    text = "x" * 200_000
    put(tmp_path, train__csv=f"text,label\n{text},0\n", test__csv="text,label\na,0\n")
    assert load_tables(str(tmp_path))[1]["train"].columns["text"] == [text]


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_parts_under_the_hubs_names(tmp_path, ending):
    for i, part in enumerate(
        ["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"]
    ):
        rows = datasets.Dataset.from_dict({"text": [f"{i}a", f"{i}b"], "label": ["x", "y"]})
        write = {"parquet": rows.to_parquet, "jsonl": rows.to_json, "csv": rows.to_csv}[ending]
        write(tmp_path / f"{part}.{ending}")
    found = load_tables(str(tmp_path))[1]
    assert found["train"].columns["text"] == ["0a", "0b", "1a", "1b"]
    assert found["test"].columns["text"] == ["2a", "2b"]
    path = tmp_path / f"train-00000-of-00002.{ending}"
    path.rename(tmp_path / f"train.{ending}")
    refused("several files for one split", load_tables, str(tmp_path))
    (tmp_path / f"train.{ending}").unlink()
    refused(r"train-00000-of-00002\..* is missing: .* has 2 parts", load_tables, str(tmp_path))


def test_one_file_is_split_at_random(tmp_path):
    rows = [{"tokens": [str(i)], "ner_tags": [i % 2], "source": "WNUT"} for i in range(50)]
    put(tmp_path, all__jsonl="\n".join(map(json.dumps, rows)))
    found = tables("wnut17", tmp_path)
    assert [len(found[part]) for part in ("train", "test")] == [40, 10]
    ids = [int(words[0]) for part in found.values() for words in part.columns["tokens"]]
    assert sorted(ids) == list(range(50))
    assert {tag for row in found["train"].columns["tags"] for tag in row} == {"O", "B-corporation"}
    again = tables("wnut17", tmp_path)["test"].columns["tokens"]
    assert again == found["test"].columns["tokens"]
    assert again != tables("wnut17", tmp_path, seed=1)["test"].columns["tokens"]


def test_a_clients_last_rows_are_held_out(tmp_path):
    clients = "aabbbbbbbaaaaac"
    rows = [{"client": client, "text": f"{i}"} for i, client in enumerate(clients)]
    put(tmp_path, train__jsonl="\n".join(map(json.dumps, rows)))
    found = tables("shakespeare", tmp_path)
    assert found["test"].columns["text"] == ["8", "13"]
    assert len(found["train"]) == len(clients) - 2


# Tags.

SENTENCE = "Ana\tB-person\nfrom\tO\nNew\tB-location\nHill\tI-location\n"


def test_wnut17(tmp_path):
    put(
        tmp_path,
        wnut17train__conll=f"{SENTENCE}\n\t\n\n{SENTENCE}",
        emerging__dev__conll="dev\n",
        emerging__test__conll="no\ntags\n",
        emerging__test__annotated="a\u00a0b\u2028c\tO\r\n",
    )
    refused(r"Line 1 of .*emerging\.dev\.conll, 'dev'", tables, "wnut17", tmp_path)
    put(tmp_path, emerging__dev__conll=SENTENCE)
    found = tables("wnut17", tmp_path)
    assert found["train"].columns["tokens"] == [["Ana", "from", "New", "Hill"]] * 2
    assert found["train"].columns["tags"][0] == ["B-person", "O", "B-location", "I-location"]
    assert found["test"].columns["tokens"] == [["a\u00a0b\u2028c"]]


def test_wnut16_and_conll2003_names(tmp_path):
    put(tmp_path / "16", train=SENTENCE, dev=SENTENCE, test="Ana B-person\n\nfrom O\n")
    assert len(tables("wnut17", tmp_path / "16")["test"]) == 2
    people = "Ana NNP I-NP I-PER\nBo NNP I-NP B-PER\n"
    train = f"-DOCSTART- -X- -X- O\n\n{people}in IN I-PP O\nRo NNP I-NP I-LOC\n"
    put(tmp_path / "03", eng__train=train, eng__testa=train, eng__testb=train)
    (tags,) = tables("wnut17", tmp_path / "03")["train"].columns["tags"]
    assert tags == ["B-PER", "B-PER", "O", "B-LOC"]


def test_ploner(tmp_path):
    conll = "Ana NNP I-NP I-PER\nwon VB I-VP O\nCup NNP I-NP I-MISC\n\nnobody NN I-NP O\n"
    put(
        tmp_path,
        conll2003_in_eng__train=conll,
        conll2003_in_eng__testb=conll,
        wnut16_in_train="Foo\tB-company\nRo\tB-geo-loc\nHall\tB-facility\n",
        README__md="words about the files",
    )
    for genre in ("bc", "bn", "mz", "nw", "tc", "wb"):
        put(tmp_path / "ontonotes", **{f"{genre}_in_train__txt": "Ro B-GPE\nMay B-DATE\n\n"})
    row = {"tokens": ["Foo"], "tags": ["B-ORG"]}
    put(tmp_path, **{"wnut16_in_dev__jsonl": json.dumps(row)})
    found = tables("ploner", tmp_path)
    rows = [
        row
        for table in found.values()
        for row in zip(*(table.columns[name] for name in ("source", "tokens", "tags")), strict=True)
    ]
    assert (len(found["train"]), len(found["test"])) == (8, 2)
    assert sorted(rows) == sorted(
        [("CoNLL", ["Ana", "won", "Cup"], ["B-PER", "O", "O"])] * 2
        + [("WNUT", ["Foo", "Ro", "Hall"], ["B-ORG", "B-LOC", "O"]), ("WNUT", ["Foo"], ["B-ORG"])]
        + [(f"On{g}", ["Ro", "May"], ["B-LOC", "O"]) for g in ("BC", "BN", "MZ", "NW", "TC", "WB")]
    )
    put(tmp_path, other__txt=SENTENCE)
    refused(r"Which source of PLONER is other\.txt\?", tables, "ploner", tmp_path)


def test_parts_of_ploner_are_read_once(tmp_path):
    row = json.dumps({"tokens": ["Ana"], "tags": ["B-PER"]})
    names = [f"wnut16_in_train-0000{i}-of-00005__jsonl" for i in range(5)]
    put(tmp_path, **dict.fromkeys(names, row))
    assert sum(len(table) for table in tables("ploner", tmp_path).values()) == 5


# Questions.


def squad(*ids, start=0):
    answers = [{"text": "Ana", "answer_start": start}, {"text": "Ana won", "answer_start": 0}]
    qas = [{"id": id_, "question": "Who won?", "answers": answers} for id_ in ids]
    return {"version": "1.1", "data": [{"paragraphs": [{"context": "Ana won.", "qas": qas}]}]}


QUESTION = {
    "question": ["Who won?"],
    "context": ["Ana won."],
    "answers": [["Ana", "Ana won"]],
    "answer_starts": [[0, 0]],
}


def test_squad(tmp_path):
    put(
        tmp_path,
        **{
            "train-v1__1__json": json.dumps(squad("1")),
            "dev-v1__1__json__gz": json.dumps(squad("2")),
        },
    )
    found = tables("squad", tmp_path)
    assert columns(found["train"]) == {"id": ["1"], **QUESTION}
    assert columns(found["test"]) == {"id": ["2"], **QUESTION}


@pytest.mark.parametrize(
    "answers",
    [
        {"answers": {"text": ["Ana", "Ana won"], "answer_start": [0, 0]}},
        {"answers": [{"text": "Ana", "answer_start": 0}, {"text": "Ana won", "answer_start": 0}]},
        {"answers": ["Ana", "Ana won"], "answer_starts": [0, 0]},
        {
            "answers": {
                "text": ["Ana", "Ana won"],
                "char_spans": [{"start": [0], "end": [2]}, {"start": [0], "end": [6]}],
            }
        },
    ],
)
def test_shapes_of_answers(tmp_path, answers):
    row = json.dumps({"question": "Who won?", "context": "Ana won.", **answers})
    put(tmp_path, train__jsonl=row, dev__jsonl=row)
    assert columns(tables("squad", tmp_path)["train"]) == {"id": ["1"], **QUESTION}
    row = {"question": "Who?", "context": "Ana.", "answer": "Ana", "answer_start": 0}
    put(tmp_path, train__jsonl=json.dumps(row))
    assert tables("squad", tmp_path)["train"].columns["answers"] == [["Ana"]]


def mrqa(name, n):
    spans = [[0, 2], [8, 10]]
    qa = {"question": "Who won?", "detected_answers": [{"text": "Ana", "char_spans": spans}]}
    rows = [{"context": "Ana won Ana", "qas": [{"qid": f"{name}{i}", **qa}]} for i in range(n)]
    header = {"header": {"dataset": name, "split": "train"}}
    return "\n".join(map(json.dumps, [header, *rows]))


def test_mrqa(tmp_path):
    put(
        tmp_path,
        train_in_SQuAD__jsonl__gz=mrqa("SQuAD", 4),
        train_in_NewsQA__jsonl=mrqa("NewsQA", 9) + "\n\n",
    )
    put(tmp_path, dev_in_SQuAD__jsonl=mrqa("SQuAD", 4))
    found = tables("mrqa", tmp_path)
    assert [len(found[part]) for part in ("train", "test")] == [7, 1]
    sources = [name for table in found.values() for name in table.columns["source"]]
    assert sorted(sources) == ["NewsQA"] * 4 + ["SQuAD"] * 4  # an equal share
    assert found["test"].columns["answers"] == [["Ana", "Ana"]]
    assert found["test"].columns["answer_starts"] == [[0, 8]]


def test_a_file_that_is_cut_short(tmp_path):
    put(tmp_path, SQuAD__jsonl__gz=mrqa("SQuAD", 99))
    path = tmp_path / "SQuAD.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    refused(r"SQuAD\.jsonl\.gz could not be read after line \d+: EOF", tables, "mrqa", tmp_path)


# Texts.

SAID = 'The <e1>cat</e1> said "hello" to a <e2>dog</e2>.'
RELATION = f'1\t"{SAID}"\r\nMessage-Topic(e1,e2)\r\nComment:\r\n\r\n'


def test_semeval(tmp_path):
    put(tmp_path, training_in_TRAIN_FILE__TXT=RELATION * 2, testing_in_TEST_FILE_FULL__TXT=RELATION)
    put(tmp_path, testing_in_TEST_FILE__TXT='1\t"unlabelled"\n')
    found = tables("semeval2010_task8", tmp_path)
    assert len(found["train"]) == 2
    assert columns(found["test"]) == {"text": [SAID], "label": ["Message-Topic(e1,e2)"]}


def test_20newsgroups_folders(tmp_path):
    for split, names in (("train", ("b", "a")), ("test", ("a",))):
        for name in names:
            put(tmp_path / f"20news-bydate-{split}", **{f"{name}_in_10{name}": b"From: \xe9\n"})
    found = tables("20newsgroups", tmp_path)
    assert columns(found["train"]) == {"text": ["From: é\n"] * 2, "label": ["a", "b"]}
    assert len(found["test"]) == 1


# Users and images: the formats themselves are tested beside their readers.


def test_writers(tmp_path):
    user = {"x": [[0.0] * 783 + [1.0]], "y": [36]}
    content = {"users": ["w"], "num_samples": [1], "user_data": {"w": user}}
    put(tmp_path, train_in_a__json=json.dumps(content), test_in_a__json=json.dumps(content))
    table = tables("emnist", tmp_path)["train"]
    assert table.columns["label"] == ["a"]
    assert table.columns["client"] == ["w"]
    assert table.columns["image"][0][-1, -1] == 255


def test_cifar10_is_not_cifar100(tmp_path):
    for batch in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        (tmp_path / batch).write_bytes(b"\3" + bytes(3072))
    assert tables("cifar10", tmp_path)["test"].columns["label"] == ["cat"]
    put(tmp_path, batches__meta__txt="a b c cat d e f g h i")  # as in its archive
    refused("label 'cat'", fp.load_dataset, "cifar100", source=str(tmp_path))


def test_fashion_mnist(tmp_path):
    for split in ("train", "t10k"):
        images = struct.pack(">4i", 0x803, 1, 28, 28) + bytes(784)
        put(tmp_path, **{f"{split}-images-idx3-ubyte__gz": images})
        put(tmp_path, **{f"{split}-labels-idx1-ubyte__gz": struct.pack(">2i", 0x801, 1) + b"\x09"})
    table = tables("fashion_mnist", tmp_path)["test"]
    assert table.columns["label"] == ["Ankle boot"]
    np.testing.assert_array_equal(table.columns["image"][0], np.zeros((28, 28), np.uint8))


def test_images_in_tables(tmp_path):
    for split in ("train", "test"):
        features = datasets.Features(
            {"img": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])}
        )
        image = np.full((4, 4, 3), 7, np.uint8)
        rows = datasets.Dataset.from_dict({"img": [image], "label": [1]}, features=features)
        rows.to_parquet(tmp_path / f"{split}.parquet")
    entry, found = load_tables(str(tmp_path))
    assert entry.task.name == "image_classification"
    assert found["train"].label_names == ("x", "y")
    assert found["train"].columns["image"][0].tolist() == image.tolist()


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_json_that_is_nested_without_end_is_refused(tmp_path, ending):
    path = tmp_path / f"train.{ending}"
    path.write_bytes(b'{"a":' * 30_000)
    refused("nested too deeply", tabular.read_file, path)
    path.write_text(json.dumps({"text": "[{" * 3000 + '" \\ ['}) + "\n")  # of a text, they are fine
    assert len(tabular.read_file(path)) == 1


# Damaged files.

GOOD = {
    "": {"test__jsonl": '{"text": "a", "label": 0}'},
    "rte": {"dev__tsv": f"{PAIR}0\tA.\tB.\tentailment\n"},
    "wnut17": {"test": SENTENCE},
    "ploner": {},
    "squad": {"dev-v1__1__json": json.dumps(squad("1"))},
    "mrqa": {},
    "semeval2010_task8": {"TEST_FILE_FULL__TXT": RELATION},
}
"""Data set, or an own folder -> a good file of its other split."""
SPAN = mrqa("SQuAD", 1).splitlines()[1].replace("[8, 10]", "[11, 13]")
BAD = [
    (
        "rte",
        "train__tsv",
        f"{PAIR}0\tA.\tB.\n",
        r"Line 2 of .*train\.tsv has 3 fields instead of 4",
    ),
    ("rte", "train__tsv", "nonsense\n", r"train\.tsv does not start with the columns"),
    ("rte", "train__tsv", "", r"train\.tsv does not start"),
    ("rte", "train__tsv", b"sentence1\tlabel\n\xff\t0\n", r"Line 2 of .*train\.tsv is not UTF-8"),
    ("rte", "train__tsv", "sentence1\tlabel\tlabel\nA.\t0\t1\n", "two columns 'label'"),
    (
        "",
        "train__csv",
        "label,text\n\n0,hello,x\n",
        r"Line 3 of .*train\.csv has 3 fields, .* has 2",
    ),
    ("", "train__csv__gz", "text,label,label\na,0,1\n", r"train\.csv\.gz has two columns 'label'"),
    (
        "",
        "train__csv",
        b"text,label\ncaf\xe9,0\n",
        r"train\.csv could not be read: it is not UTF-8",
    ),
    ("", "train__csv", "text,label\na,0\n".encode("utf-16"), "encoding, such as utf-16"),
    (
        "",
        "train__jsonl",
        b'{"text": "caf\xe9", "label": 0}',
        r"Line 1 of .*train\.jsonl is not UTF-8",
    ),
    ("", "train__jsonl", "", r"train\.jsonl could not be read: it has no rows"),
    ("", "train__jsonl__gz", "", r"train\.jsonl\.gz could not be read: it has no rows"),
    *(
        (
            "wnut17",
            "train",
            f"{SENTENCE}{line}\n",
            "Line 5 of .*train, .* is not a word and its tag",
        )
        for line in ("word", "word\tX-person", "\tO", "word B")
    ),
    *(
        ("ploner", "conll2003_in_a__jsonl", json.dumps({"tokens": ["a"], "tags": tags}), match)
        for tags, match in (
            ([1], r"Row 1 of .*a\.jsonl has the tag 1 at the word 'a'"),
            ([None], r"Row 1 of .*a\.jsonl has the tag None"),
            (["PER"], r"Row 1 of .*a\.jsonl has the tag 'PER'"),
            (["O", "O"], r"Row 1 of .*a\.jsonl has 1 words but 2 tags"),
            (None, r"Row 1 of .*a\.jsonl has None in place of a list of tags"),
        )
    ),
    *(
        ("squad", "train-v1__1__json", content, match)
        for content, match in (
            (json.dumps(squad("1", "2", "1")), r"Row 3 of .*v1\.1\.json has the id '1', .* row 1"),
            (json.dumps({"data": [{}]}), r"train-v1\.1\.json has no field 'paragraphs'"),
            (json.dumps([1]), r"train-v1\.1\.json is malformed"),
            ("{", r"train-v1\.1\.json is not a JSON file"),
            ("[" * 100_000, r"train-v1\.1\.json is not a JSON file"),
            (json.dumps({"data": []}), r"train-v1\.1\.json has no rows"),
            (json.dumps(squad("1", start="x")), r"Row 1 of .*for its answers"),
            (json.dumps(squad("1", start=float("inf"))), r"Row 1 of .*inf is not a whole number"),
            (json.dumps(squad("1", start=0.9)), r"Row 1 of .*0\.9 is not a whole number"),
            (json.dumps(squad("1", ["a"])), r"Row 2 of .*has the id .*neither a text nor"),
            (json.dumps(squad(1, "1")), r"Row 2 of .*has the id '1', which row 1 has too"),
        )
    ),
    *(
        ("mrqa", "SQuAD__jsonl", f"{mrqa('SQuAD', 1)}\n{line}", match)
        for line, match in (
            ('{"context": "x"}', r"^Line 3 of .*SQuAD\.jsonl has no field 'qas'"),
            ("{", r"^Line 3 of .*SQuAD\.jsonl is not JSON"),
            ("[" * 100_000, r"^Line 3 of .*SQuAD\.jsonl is not JSON"),
            (SPAN, r"^Row 2 of .*characters 11 to 13 are not in the context"),
        )
    ),
    *(
        ("semeval2010_task8", "TRAIN_FILE__TXT", f"{RELATION}{lines}", match)
        for lines, match in (
            ('2\t"A."\n3\t"B."\n', r"Line 6 of .*TRAIN_FILE\.TXT .*in place of the relation"),
            ("Other\n", r"Line 5 of .*in place of a numbered sentence"),
            ('2\t"A."\n', r"TRAIN_FILE\.TXT ends before the relation"),
        )
    ),
]


@pytest.mark.parametrize(("name", "file", "content", "match"), BAD, ids=range(len(BAD)))
def test_bad_files_are_named(tmp_path, name, file, content, match):
    put(tmp_path, **GOOD[name], **{file: content})
    how = Reading(source=str(tmp_path)) if name else Reading()
    refused(match, load_tables, name or str(tmp_path), how)
