"""Every task end to end on the command line, from files in their original format."""

import functools
import gzip
import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from closeness import approx, assert_close
from internals import DATASETS, cli, config, programs, read_metrics
from refusals import refused
from shallow import simple_encoder  # noqa: F401

import fedjax_peft as fp
from fedjax_peft import embed, heads, load_model, load_tokenizer, tasks, testing

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simple_encoder")]

CONFIG = """
rounds = 1
batch_size = 8
local_steps = 2
partition = {{ name = "iid", clients = 2 }}
optimizer.learning_rate = 1e-2

[data]
name = "{name}"
source = "{folder}"
max_length = 20
{data}

[model]
{model}
"""
BERT = 'name = "{root}/model"'
RNN = """
name = "rnn"
[model.config]
model_type = "rnn"
vocab_size = 64
embedding_size = 8
hidden_size = 8
[peft]
name = "head_only"
"""
VIT = """
name = "vit"
[model.config]
model_type = "vit"
num_hidden_layers = 1
hidden_size = 16
num_attention_heads = 2
intermediate_size = 16
image_size = 28
patch_size = 14
num_channels = 1
"""
WORDS = [f"w{i}" for i in range(50)]
TYPES = ("person", "location", "group")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a tiny checkpoint and its tokenizer."""
    folder = tmp_path_factory.mktemp("tasks")
    testing.write_tiny_checkpoint(folder / "model")
    return folder


def lines(seed, n=40):
    rng = np.random.default_rng(seed)
    return [[WORDS[i] for i in rng.integers(0, 50, rng.integers(3, 12))] for _ in range(n)]


def sst2(folder):
    """GLUE's tsv: a sentence with w0 to w24 first is positive."""
    for seed, split in enumerate(("train", "dev")):
        rows = [f"{' '.join(s)}\t{int(WORDS.index(s[0]) < 25)}" for s in lines(seed)]
        (folder / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")


def wnut17(folder):
    """CoNLL columns: every tenth word is a name."""
    files = ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated")
    for seed, file in enumerate(files):
        tagged = ["\n".join(f"{w}\t{tag(w)}" for w in s) for s in lines(seed)]
        (folder / file).write_text("\n\n".join(tagged) + "\n")


def tag(word):
    i = WORDS.index(word)
    return "O" if i % 10 else f"B-{TYPES[i // 10 % 3]}"


def squad(folder):
    """SQuAD's json: the answer is the context's second word."""
    for seed, split in enumerate(("train", "dev")):
        paragraphs = []
        for i, words in enumerate(lines(seed)):
            answer = {"text": words[1], "answer_start": len(words[0]) + 1}
            question = {"id": f"{split}{i}", "question": "w1 w2", "answers": [answer]}
            paragraphs.append({"context": " ".join(words), "qas": [question]})
        content = {"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}
        (folder / f"{split}-v1.1.json").write_text(json.dumps(content))


def stack_overflow(folder):
    """TensorFlow Federated's sentences by user."""
    for seed, split in enumerate(("train", "test")):
        texts = [" ".join(s) for s in lines(seed)]
        users = {f"user {u}": {"tokens": texts[u::4]} for u in range(4)}
        (folder / f"{split}.json").write_text(json.dumps(users))


def fashion_mnist(folder):
    """MNIST's idx: the class is the brightness of the image."""
    for part in ("train", "t10k"):
        labels = np.arange(40, dtype=np.uint8) % 10
        pixels = np.broadcast_to(labels[:, None, None] * 25, (40, 28, 28)).astype(np.uint8)
        for name, x in {"images-idx3": pixels, "labels-idx1": labels}.items():
            header = struct.pack(f">{1 + x.ndim}I", 0x0800 + x.ndim, *x.shape)
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(header + x.tobytes()))


CASES = {
    "sst2": (sst2, BERT, "", "accuracy", {"accuracy", "macro_f1"}),
    "wnut17": (wnut17, BERT, "", "f1", {"accuracy", "f1", "precision", "recall", "lost_entities"}),
    "squad": (squad, BERT, "", "f1", {"accuracy", "exact_match", "f1", "raw_f1"}),
    "stack_overflow": (
        stack_overflow, RNN, 'tokenizer = "{root}/model"', "accuracy", {"accuracy", "perplexity"}
    ),
    "fashion_mnist": (fashion_mnist, VIT, "", "accuracy", {"accuracy", "macro_f1"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def config_of(root):
    """Returns a function that writes the files of a data set and returns a config's path."""

    @functools.cache
    def of(name):
        write, model, data, *_ = CASES[name]
        (root / name).mkdir()
        write(root / name)
        model, data = (text.replace("{root}", str(root)) for text in (model, data))
        text = CONFIG.format(name=name, folder=root / name, data=data, model=model)
        (root / f"{name}.toml").write_text(text)
        return str(root / f"{name}.toml")

    return of


NATURAL = ['partition={name="natural"}', "evaluation.client_test=true"]


@pytest.fixture(scope="module")
def finished(root, config_of):
    """Returns a function that returns the run of a data set."""

    @functools.cache
    def run(name):
        more, out = NATURAL if name == "stack_overflow" else [], root / "runs" / name
        assert cli.main(["run", config_of(name), "--out", str(out), *more]) == 0
        return out

    return run


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample("wnut17", "squad")  # test_data_vocabulary.py has a run on words
def test_a_task_from_its_files(finished, capsys, name):
    headline, metrics = CASES[name][3:]
    rows = read_metrics(finished(name) / "metrics.jsonl")
    assert rows[0]["headline"] == headline
    for row in rows:
        for metric in metrics:
            assert row[f"test_{metric}"] >= 0, metric
    assert rows[1]["train_loss"] > 0
    assert 0 <= rows[1]["train_accuracy"] <= 1
    assert ("padding_share" in rows[1]) == (name != "fashion_mnist")
    assert {"f1": "F1", "accuracy": "acc."}[headline] in capsys.readouterr().out


def test_a_config_chooses_fednlps_metric(finished, config_of, root, capsys):
    out = root / "runs" / "raw"
    overrides = ["metric=fednlp_raw", "--out", str(out)]
    assert cli.main(["run", config_of("squad"), *overrides]) == 0
    rows = read_metrics(out / "metrics.jsonl")
    assert rows[0]["headline"] == "raw_f1"
    usual = read_metrics(finished("squad") / "metrics.jsonl")
    assert [row["test_raw_f1"] for row in rows] == [row["test_raw_f1"] for row in usual]
    overrides = ["metric=fednlp_raw", "--out", str(root / "never")]
    assert cli.main(["run", config_of("sst2"), *overrides]) == 2
    assert "metric = 'fednlp_raw' means nothing for the data set 'sst2'" in capsys.readouterr().err


def test_a_config_chooses_the_order_of_tag_sets(config_of, root, capsys):
    sets = {}
    for order in ("sorted", "first_seen"):
        raw = config.override(config.load(config_of("wnut17")), f"data.order={order}")
        data, _ = config.federation(config.resolve(raw))
        sets[order] = data["train"].meta["tag_set"]
    assert sorted(sets["sorted"].tolist()) != sorted(sets["first_seen"].tolist())
    assert len(set(sets["first_seen"])) >= len(set(sets["sorted"]))
    overrides = ["data.order=first_seen", "--out", str(root / "never")]
    assert cli.main(["run", config_of("sst2"), *overrides]) == 2
    assert "order = 'first_seen' means nothing to the data set 'sst2'" in capsys.readouterr().err


def predict(run, tmp_path, rows):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arguments = ["--input", str(source), "--output", str(target)]
    assert cli.main(["predict", str(run), *arguments]) == 0
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_predicted_tags_are_one_for_each_word(finished, tmp_path):
    long = ["w3"] * 40  # of which 18 fit
    rows = [{"tokens": ["w0", "\u200b", "w3"]}, {"tokens": []}, {"tokens": long}]
    predictions = predict(finished("wnut17"), tmp_path, rows)
    assert [len(row["tags"]) for row in predictions] == [3, 0, 40]
    assert set(predictions[2]["tags"][18:]) == {"O"}
    tags = {tag for row in predictions for tag in row["tags"]}
    assert tags <= set(DATASETS["wnut17"].label_names)


def test_predicted_answers_are_of_their_context(finished, tmp_path):
    rows = [{"question": "w1", "context": "w5  w6 w7"}, {"question": "w1 w2", "context": ""}]
    predictions = predict(finished("squad"), tmp_path, rows)
    assert predictions[0]["answer"]
    assert predictions[0]["answer"] in "w5  w6 w7"
    assert predictions[1] == {"answer": ""}


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("wnut17", '{"text": "w1"}', 'line 1 is not a JSON object with a list "tokens"'),
        ("squad", '{"question": "w1"}', 'line 1 is not a JSON object with a string "context"'),
        ("stack_overflow", '{"text": "w1"}', 'line 1 is not a JSON object with a string "prompt"'),
    ],
)
def test_lines_for_another_task_are_named(finished, tmp_path, capsys, name, line, message):
    (tmp_path / "in.jsonl").write_text(line)
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main(["predict", str(finished(name)), *files]) == 2
    assert message in capsys.readouterr().err


def test_clients_are_tested_on_their_own_part_of_the_test_split(finished):
    last = read_metrics(finished("stack_overflow") / "metrics.jsonl")[-1]
    assert last["client_perplexity_worst"] >= last["client_perplexity_mean"]
    assert last["client_accuracy_worst"] <= last["client_accuracy_mean"]
    # Unequal clients, yet about what the whole test split says.
    assert last["client_loss_mean"] == approx(last["test_loss"], rel=0.1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (NATURAL[1:], "name = 'natural' have such examples, not those of 'iid'"),
        ([*NATURAL, "evaluation.client_holdout=0.1"], "use only one"),
    ],
)
def test_client_test_needs_clients_that_are_in_the_test_split_too(
    overrides, message, config_of, root, capsys
):
    out = ["--out", str(root / "never")]
    assert cli.main(["run", config_of("sst2"), *out, *overrides]) == 2
    assert message in capsys.readouterr().err
    assert not (root / "never").exists()


def oracle(data):
    """Returns the outputs of a model that knows the labels."""
    columns = data.columns
    if data.task.name == "question_answering":
        at = np.stack([columns["start_positions"], columns["end_positions"]], axis=-1)
        hot = np.arange(columns["input_ids"].shape[1])[None, :, None] == at[:, None]
        return fp.contracts.Outputs(9.0 * jnp.asarray(hot), jnp.zeros(0))
    if data.task.name in ("next_token", "instruction_tuning"):
        after = np.roll(columns["input_ids"], -1, axis=1)
        return fp.contracts.Outputs(
            9.0 * jnp.asarray(np.arange(64) == after[..., None]), jnp.zeros(0)
        )
    labels = columns["labels"][..., None]
    return fp.contracts.Outputs(
        9.0 * jnp.asarray(np.arange(len(data.label_names)) == labels), jnp.zeros(0)
    )


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.sample(
    *("sst2", "mnli", "wnut17", "squad", "stack_overflow", "alpaca", "gsm8k", "aya", "emnist")
)  # of each task, with each form of its examples
def test_who_knows_the_labels_scores_one(root, name):
    tokenizer = load_tokenizer(root / "model")
    data = fp.load_dataset(name, tokenizer=tokenizer, source="tiny")["test"]
    task, outputs = tasks.for_data(data), oracle(data)
    means = {k: float(s / n) for k, (s, n) in task.metrics(outputs, data.columns).items()}
    predictions = {} if task.predict is None else task.predict(outputs, data.columns)
    scores = means | task.score(means, {k: np.asarray(x) for k, x in predictions.items()}, data)
    assert scores["accuracy"] == 1
    assert scores[task.headline] == 1
    for metric in ("macro_f1", "exact_match", "raw_f1", "recall"):
        assert scores.get(metric, 1) == 1
    assert scores.get("perplexity", 1) < 1.02


def test_embeddings_do_not_depend_on_padding_and_compile_once(root):
    model = load_model(root / "model", head=heads.classification(2))
    short = embed(model, ["w1 w2", "w3"], max_length=8)
    assert short.shape == (2, 32)
    assert_close(embed(model, ["w1 w2", "w3"], max_length=30), short, atol=1e-5)
    assert np.abs(short[0] - short[1]).max() > 0.1
    whole = embed(model, ["w1 w2", "w3"], pooling="cls", max_length=30)
    assert_close(embed(model, ["w1 w2"], pooling="cls", max_length=8)[0], whole[0], atol=1e-5)
    assert np.abs(whole - short).max() > 0.1
    assert len(programs.of(model.apply)) == 2, "one for each way to pool"
    refused("clss", embed, model, ["w1"], pooling="clss")
    for size in (0, -1, 1.5):
        refused(f"batch_size = {size} of", embed, model, ["w1"], max_length=8, batch_size=size)
