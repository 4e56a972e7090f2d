"""Vocabularies of words, and the draw of users."""

import json

import numpy as np
import pytest
from internals import Table
from internals import config as configs
from refusals import refusals, refused

import fedjax_peft as fp
from fedjax_peft.data.subsets import keep_users
from fedjax_peft.data.vocabulary import count_words, word_tokenizer

TEXTS = ["to be, or not to be", "To sleep; to dream", "be not afraid"]
# be 3, to 3, not 2; once: , ; To afraid dream or sleep (ASCII order)
TOKENS = ("<pad>", "<unk>", "<eos>", "be", "to", "not", ",", ";", "To", "afraid", "dream", "or")


def test_words_and_ids_by_hand():
    assert count_words(TEXTS, 12) == count_words([*reversed(TEXTS)], 12) == TOKENS
    assert count_words(TEXTS, 6) == TOKENS[:6]
    assert count_words(TEXTS, 1000) == (*TOKENS, "sleep")
    tokenizer = word_tokenizer(TOKENS)
    ids = tokenizer(["To be, or not: sleep", ""])["input_ids"]
    assert ids == [[8, 3, 6, 11, 5, 1, 1], []]
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.decode([8, 3, 11]) == "To be or"
    tokens = count_words(["<unk> <unk> a", "a\ud800"], 20)  # a special token counts once
    assert len(set(tokens)) == len(tokens)
    word_tokenizer(tokens)
    refused("vocabulary = 3 leaves no place for a word", count_words, TEXTS, 3)
    refused("no words", count_words, ["", " \n"], 9)


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with a training split, and a test split with a new word."""
    for split, texts in (("train", TEXTS), ("test", ["to be zzz"])):
        rows = [{"text": text, "client": f"role {i}"} for i, text in enumerate(texts)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_words_come_from_the_training_split_only(folder):
    data = fp.load_dataset(str(folder), vocabulary=12, max_length=8)
    assert data["train"].vocabulary == data["test"].vocabulary == TOKENS
    assert data["test"].columns["input_ids"].tolist() == [[4, 3, 1, 2, 0, 0, 0, 0]]
    assert data["train"].columns["input_ids"][2].tolist() == [3, 5, 9, 2, 0, 0, 0, 0]
    for name, options, message in (
        (folder, {"vocabulary": 12, "tokenizer": word_tokenizer(TOKENS)}, "give only one of them"),
        (folder, {"vocabulary": "12"}, "must be a whole number"),
        ("cifar10", {"vocabulary": 9, "source": "tiny"}, "vocabulary = 9 means nothing"),
        ("cifar10", {"user_examples": 2, "source": "tiny"}, "user_examples = 2 means nothing"),
    ):
        refused(message, fp.load_dataset, name, **options)


KTO = fp.tasks.preference(loss="kto")
LETTERS = fp.tasks.multiple_choice(style="letters")
QUESTION = {"question": "who is", "choices": ["he", "she"], "answer": 1}
SPAN = {"context": "he is here", "question": "where", "answer": "here", "answer_start": 6}


@pytest.mark.parametrize(
    ("row", "task", "words"),
    [
        ({"text": "a b", "text_pair": "c", "label": "x"}, None, "a b c"),
        (QUESTION, None, "he is she who"),
        (QUESTION, LETTERS, ". : A Answer B he is she who"),
        (SPAN, None, "he here is where"),
        ({"prompt": "who", "chosen": "he", "rejected": "she"}, None, "he she who"),
        ({"prompt": "who", "completion": "he", "label": True}, KTO, "he who"),
    ],
)
def test_a_vocabulary_has_the_words_of_all_texts_of_a_row(row, task, words):
    """Second texts, choices, contexts and answers were ``<unk>``, and the choices equal."""
    splits = {"train": [row], "test": [row]}
    data = fp.load_dataset(splits, task=task, vocabulary=60)["train"]
    assert {*data.vocabulary[3:]} == {*words.split()}


def recurrent(**changes):
    """Returns a small config of a recurrent model over words."""
    shape = {"model_type": "rnn", "embedding_size": 4, "hidden_size": 5, "vocab_size": 12}
    return {
        "rounds": 1,
        "local_steps": 1,
        "batch_size": 2,
        "model": {"name": "rnn", "config": shape},
        "partition": "natural",
        "peft": "head_only",
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
    } | changes


@pytest.mark.slow
def test_a_run_keeps_its_words(folder, tmp_path):
    data = {"name": str(folder), "vocabulary": 12, "max_length": 8}
    config = configs.resolve(recurrent(data=data))
    out = tmp_path / "out"
    run = configs.run(config, out=out)
    expected = run.predict(["to be", "zzz not"])
    (folder / "train.jsonl").unlink()
    loaded = fp.load_run(out)
    np.testing.assert_array_equal(loaded.predict(["to be", "zzz not"]), expected)
    assert expected.shape == (2, 8, 12)
    loaded.export(tmp_path / "merged", format="merged")
    again = fp.load_tokenizer(tmp_path / "merged")
    assert again("To be zzz")["input_ids"] == [8, 3, 1]
    (out / "vocabulary.json").write_text("[1]")
    refused(r"vocabulary\.json is damaged: it must be a list", fp.load_run, out)


def test_pretrained_models_have_their_own_words(folder, tmp_path):
    encoder = fp.testing.write_tiny_checkpoint(tmp_path / "bert")
    config = recurrent(data={"name": str(folder), "vocabulary": 12}, model=str(encoder))
    refused("which a pretrained model does not know", configs.federation, configs.resolve(config))


# ---------------------------------------------------------------------------------------- users


def table(sizes):
    names = [name for name, n in sizes.items() for _ in range(n)]
    return Table("the file", {"text": [f"{i}" for i in range(len(names))], "client": names})


def test_the_same_users_in_all_splits():
    sizes = {f"u{i:02d}": 1 + i % 4 for i in range(30)}
    tables = {"train": table(sizes), "test": table(dict.fromkeys([*sizes][:20], 2))}
    few, more = (keep_users(tables, n, 3, seed=0) for n in (3, 6))
    names = [set(x["train"].columns["client"]) for x in (few, more)]
    assert names[0] < names[1]
    assert set(few["test"].columns["client"]) == names[0]
    assert len(few["test"]) == 6
    assert len(few["train"]) == sum(sizes[name] for name in names[0])
    assert all(sizes[name] >= 3 for name in names[1])
    assert few["train"].columns["text"] == sorted(few["train"].columns["text"], key=int)
    assert keep_users(few, 3, 1, seed=5)["train"].columns == few["train"].columns


test_users_that_cannot_be_drawn = refusals(
    lambda tables, users: keep_users(tables, users, 1, 0),
    (
        {"train": table({"a": 2, "b": 1}), "test": table({"c": 1, "a": 1})},
        2,
        "there are 1 ",
    ),
    ({"train": table({"a": 2})}, 0, "users = 0 must be at least 1"),
    ({"train": Table("t", {"text": ["x"]})}, 1, "no column 'client', only: text"),
)


def test_natural_grouped_and_iid_clients_of_the_same_users():
    """FedAdapters' "IID" merges 27 users into 9 clients; dealt out at random they are IID."""
    options = {"source": "tiny", "vocabulary": 60}
    nine = fp.load_dataset("shakespeare", users=9, **options)
    more = fp.load_dataset("shakespeare", users=27, **options)
    natural = fp.partition.natural(nine["train"])
    grouped = fp.partition.grouped(more["train"], 9)
    iid = fp.partition.iid(more["train"], 9)
    assert len(natural) == len(grouped) == len(iid) == 9
    assert set(natural.names) <= set(more["train"].meta["client"])
    assert grouped.sizes.sum() == iid.sizes.sum() == len(more["train"])
    users = [{*more["train"].meta["client"][rows]} for rows in grouped.indices]
    assert [len(x) for x in users] == [3] * 9
    assert set(nine["test"].meta["client"]) == set(natural.names)
