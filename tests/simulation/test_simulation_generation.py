"""Completions in the evaluation of a run, and those of its models afterwards."""

import json

import numpy as np
import optax
import pytest
from closeness import approx, assert_small
from compiled import compilations
from internals import cli, exact_match, mean_score, rouge_l
from options import run_options

import fedjax_peft as fp
from fedjax_peft import simulate, tasks

pytestmark = pytest.mark.slow

WORDS = ["red", "blue", "green", "sun", "tree", "sea"]
NEW = 6


def talks(n, seed):
    """Returns conversations whose answer repeats the first word of the prompt."""
    rng = np.random.default_rng(seed)
    pairs = [rng.choice(WORDS, 1 + i % 3) for i in range(n)]
    return [
        [
            {"role": "user", "content": " ".join(words)},
            {"role": "assistant", "content": str(words[0])},
        ]
        for words in pairs
    ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("generation")
    fp.testing.write_tiny_language_model(root / "model", initializer_range=0.3, num_hidden_layers=1)
    (root / "data").mkdir()
    for split, (n, seed) in {"train": (40, 0), "test": (10, 1)}.items():
        lines = [json.dumps({"messages": talk}) for talk in talks(n, seed)]
        (root / "data" / f"{split}.jsonl").write_text("\n".join(lines))
    return root


@pytest.fixture(scope="module")
def model(directory):
    model = fp.load_model(directory / "model", head=fp.heads.causal_lm())
    return fp.attach(model, fp.lora(rank=4))


@pytest.fixture(scope="module")
def data(directory, model):
    task = tasks.instruction_tuning(metric="exact_match", max_new_tokens=NEW)
    path = str(directory / "data")
    return fp.load_dataset(path, tokenizer=model.tokenizer, max_length=32, task=task)


FEDAVG = fp.algorithms.fedavg(optax.adam(3e-3))


def run(model, data, algorithm=FEDAVG, rounds=2, **options):
    clients = fp.partition.iid(data["train"], 4, seed=0)
    options = {"clients_per_round": 4, "batch_size": 4, "eval_batch_size": 8, **options}
    return simulate(
        model, algorithm, clients, test=data["test"], rounds=rounds, **run_options(**options)
    )


def asked(data):
    """Returns the prompts of the test set, and their gold answers."""
    rows = zip(data.columns["prompt_ids"], data.columns["prompt_mask"], strict=True)
    return [ids[mask] for ids, mask in rows], [data.references[i] for i in data.meta["unit"]]


def test_scores_of_a_round_are_those_of_the_completions(model, data, directory, tmp_path):
    result = run(model, data, out=tmp_path / "run")
    row = result.metrics[-1]
    assert (row["headline"], row["tokenizer"]) == ("exact_match", "rouge_score")
    prompts = [talk[0]["content"] for talk in talks(10, 1)]
    _, golds = asked(data["test"])
    texts = result.generate(prompts, max_new_tokens=NEW)
    assert len({*texts}) > 1
    assert row["test_rouge_l"] == approx(mean_score(rouge_l, texts, golds))
    assert row["test_exact_match"] == approx(mean_score(exact_match, texts, golds))
    # From disk, where a run in Python keeps its task and its template.
    loaded = fp.load_run(tmp_path / "run")
    assert loaded.generate(prompts, max_new_tokens=NEW) == texts
    told = [[{"role": "user", "content": text}] for text in prompts]
    assert loaded.generate(told, max_new_tokens=NEW) == texts
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    arguments = ["--input", str(source), "--output", str(target), "--max-new-tokens", str(NEW)]
    assert cli.main(["predict", str(tmp_path / "run"), *arguments]) == 0
    lines = target.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"completion": text} for text in texts]


def test_a_run_warns_of_gold_answers_that_it_cannot_generate(model, data):
    def stop(phase):
        raise KeyboardInterrupt

    task = tasks.instruction_tuning("exact_match", max_new_tokens=1)
    said = pytest.warns(UserWarning, match="gold answers of .* test examples")
    with said as caught, pytest.raises(KeyboardInterrupt):
        run(model, data, task=task, on_phase=stop)
    assert [warning.filename for warning in caught] == [__file__]


def test_one_program_generates_in_all_rounds(model, data):
    run(model, data)
    compilations.clear()
    run(model, data, rounds=4, eval_every=1)
    assert not compilations


def test_personal_models_generate_too(model, data):
    """In FedSA-LoRA clients keep B: each completes the test prompts with its own model."""
    result = run(model, data, fp.algorithms.fedsa(optax.adam(3e-3)), test_clients=3, lanes=2)
    scores = []
    prompts = [talk[0]["content"] for talk in talks(10, 1)]
    _, golds = asked(data["test"])
    assert result.metrics[-1]["test_count"] == 3
    for client in range(4):
        texts = result.generate(prompts, client=client, max_new_tokens=NEW)
        scores.append(mean_score(rouge_l, texts, golds))
    triples = [np.mean(np.delete(scores, i)) for i in range(4)]
    assert_small(np.abs(np.array(triples) - result.metrics[-1]["test_rouge_l"]).min(), 1e-6)
