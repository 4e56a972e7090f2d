"""Preferences: losses and gradients beside TRL's, forms of rows, and what is refused."""

import functools
import json
import re
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from closeness import assert_close
from internals import (
    Table,
    encode,
    encoder_of,
    explicit,
    generation,
    gradient_start,
    running,
    with_options,
)
from internals import config as configs
from refusals import refused
from safetensors.numpy import load_file
from small_config import small

import fedjax_peft as fp
from fedjax_peft.models.decoding import NO_TOKEN
from fedjax_peft.simulation.storage.named_data import data_tables

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "preferences" / "trl.safetensors"
PAIRS = [
    ("Is it red?", "Yes, it is.", "No."),
    ("Say a word.", "Word", "I would rather say three words"),
    ("2 and 2?", "4", "It is 5, I think."),
    ("Who are you", "nobody at all, really", "me"),
]
"""Those of ``preferences_golden.py``, as its models are."""
OPTIONS = {
    "dpo": {"beta": 0.2},
    "ipo": {"beta": 0.2},
    "orpo": {"beta": 0.2},
    "simpo": {"beta": 2.0, "gamma": 0.7},
    "kto": {"beta": 0.2, "desirable_weight": 1.2},
}
LEAVES = ("model.layers.0.self_attn.q_proj", "model.norm")


def rows(pairs=PAIRS):
    return dict(
        zip(("prompt", "chosen", "rejected"), map(list, zip(*pairs, strict=True)), strict=True)
    )


@functools.cache
def golden():
    return load_file(GOLDEN)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    how = {"initializer_range": 0.1, "num_hidden_layers": 1}
    folder, write = tmp_path_factory.mktemp("models"), fp.testing.write_tiny_language_model
    paths = [write(folder / str(seed), seed=seed, **how) for seed in (0, 1)]
    return [fp.load_model(path, head=fp.heads.causal_lm()) for path in paths]


def encoded(model, columns, loss="dpo", max_length=64, **options):
    task = fp.tasks.preference(loss, **options)
    table = encoder_of(task).prepare(Table("rows", columns))
    return encode(task, table, (), model.tokenizer, max_length=max_length, name="rows")


@functools.cache
def loss_and_gradient(apply, of_task):
    def loss(leaves, frozen, trainable, batch):
        outputs = apply({**frozen, **leaves}, trainable, batch, None, False)
        total, count = of_task(outputs, batch)
        return total / count

    return jax.jit(jax.value_and_grad(loss))


def measured(model, data):
    leaves = {name: x for name, x in model.frozen.items() if name.startswith(LEAVES)}
    function = loss_and_gradient(model.apply, data.task.loss)
    return function(leaves, model.frozen, model.trainable, dict(data.columns))


@pytest.mark.parametrize("loss", OPTIONS)
def test_losses_and_gradients_are_those_of_trl(models, loss):
    """As single rows, with a padded row, and packed."""
    policy, reference = models[::-1] if loss == "kto" else models
    data = encoded(policy, rows(), loss, **OPTIONS[loss])
    clients = fp.Clients(data, (np.arange(len(data), dtype=np.int32),))
    prepare = data.task.prepare or (lambda model, data, owned: data)
    single = prepare(reference, data, clients.indices)
    padded = {name: np.concatenate([x, x[:1]]) for name, x in single.columns.items()}
    padded["mask"] = np.arange(len(data) + 1) < len(data)
    forms = [single, fp.Dataset(padded, task=data.task)]
    if loss != "kto":
        packed = clients.pack(256)
        assert len(packed.data) < len(data)
        forms.append(prepare(reference, packed.data, packed.indices))
    expected = {name: golden()[f"{loss}.{name}.weight"] for name in LEAVES}
    for form in forms:
        value, gradients = measured(policy, form)
        # Sums over 32 tokens, of terms of a few nats.
        assert_close(value, golden()[f"{loss}.loss"], rtol=1e-5)
        for name, gradient in gradients.items():
            known = expected[name.rpartition(".")[0]]
            known = known.T if name.endswith("kernel") else known
            assert_close(gradient, known, rtol=0, atol=1e-5 * np.abs(known).max())


def test_tokens_are_those_of_trl(models):
    data = encoded(models[0], rows())
    names = ("input_ids", "attention_mask", "completion_mask")
    ids, mask, answers = (golden()[f"dpo.{name}"] for name in names)
    for row in range(len(PAIRS)):
        for text, other in enumerate((row, row + len(PAIRS)), 1):
            own = data.columns["segment_ids"][row] == text
            length = own.sum()
            assert data.columns["input_ids"][row][own].tolist() == ids[other][:length].tolist()
            assert data.columns["loss_mask"][row][own].tolist() == answers[other][:length].tolist()
            assert not mask[other][length:].any()


def said(role, content):
    return {"role": role, "content": content}


ASKED, ANSWERED = said("user", "Hi?"), said("assistant", "Ho.")
TALK = [ASKED, ANSWERED, said("user", "Who?")]
FORMS = {
    "lists with a prompt": {
        "prompt": [TALK],
        "chosen": [[said("assistant", "I")]],
        "rejected": [[said("assistant", "you")]],
    },
    "whole lists": {
        "prompt": ["Who?"],
        "chosen": [[*TALK, said("assistant", "I")]],
        "rejected": [[*TALK, said("assistant", "you")]],
    },
    "texts of HH": {
        "chosen": ["\n\nHuman: Hi?\n\nAssistant: Ho.\n\nHuman: Who?\n\nAssistant: I"],
        "rejected": ["\n\nHuman: Hi?\n\nAssistant: Ho.\n\nHuman: Who?\n\nAssistant: you"],
    },
    "a prompt of HH": {
        "prompt": ["\n\nHuman: Hi?\n\nAssistant: Ho.\n\nHuman: Who?\n\nAssistant:"],
        "chosen": ["I"],
        "rejected": ["you"],
    },
}


def test_all_forms_give_the_same_rows(models):
    found = [encoded(models[0], columns) for columns in FORMS.values()]
    decode = models[0].tokenizer.decode
    for data in found:
        for name, column in data.columns.items():
            np.testing.assert_array_equal(column, found[0].columns[name], err_msg=name)
        for text, answer in enumerate(("I", "you"), 1):
            own = (data.columns["segment_ids"][0] == text) & data.columns["loss_mask"][0]
            assert decode(data.columns["input_ids"][0][own]).startswith(answer)
        assert data.references == ("I",)


def test_labelled_answers(models):
    columns = {"prompt": ["a", "b"], "completion": ["x", "y"], "label": ["false", True]}
    data = encoded(models[0], columns, "kto")
    assert data.columns["preferred"].tolist() == [[False], [True]]
    pairs = encoded(models[0], rows(), "kto")
    assert pairs.meta["unit"].tolist() == [0, 1, 2, 3] * 2
    assert pairs.columns["preferred"][:, 0].tolist() == [True] * 4 + [False] * 4


def test_unrelated_answers_are_of_the_same_client(models):
    policy, _ = models
    data = encoded(policy, rows(), "kto")
    owned = (np.array([0, 4, 1]), np.array([7]))
    made = data.task.prepare(policy, data, owned).columns
    ids, real, answers = (made[name] for name in ("input_ids", "segment_ids", "loss_mask"))
    for rows_of in owned:
        for row, before in zip(rows_of, np.roll(rows_of, 1), strict=True):
            given = ids[before][(real[before] == 1) & answers[before]]
            assert ids[row][(real[row] == 2) & answers[row]].tolist() == given.tolist()
    assert "prompt_ids" not in made  # a row is no single example any more
    assert "prompt_ids" in data.task.prepare(policy, data, ()).columns


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_prompt_is_completed_in_the_form_of_training(models, loss, monkeypatch):
    """As a text and as messages, with the template of the data."""
    given = []

    def complete(model, params, tokens, how, seed, *, ends, batch_size):
        given.append((tokens, ends))
        return np.full((len(tokens), 1), NO_TOKEN)

    monkeypatch.setattr(generation, "complete", complete)
    task = with_options(fp.tasks.preference(loss), template="Q: {prompt}\nA: ")
    columns = {name: [*x, *FORMS["a prompt of HH"][name]] for name, x in rows().items()}
    table = encoder_of(task).prepare(Table("rows", columns))
    data = encode(task, table, (), models[0].tokenizer, max_length=64, name="rows").columns
    expected = [data["prompt_ids"][i][data["prompt_mask"][i]].tolist() for i in range(5)]
    prompts = columns["prompt"]
    for asked in (prompts, [*([said("user", text)] for text in prompts[:4]), TALK]):
        fp.generate(models[0], models[0].trainable, asked, task=task)
        tokens, ends = given.pop()
        assert [row.tolist() for row in tokens] == expected
        assert {*data["end_ids"][0].tolist()} <= {*ends}


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_the_recorded_length_is_that_of_one_text(models, loss, tmp_path):
    file = tmp_path / "pairs.jsonl"
    table = [dict(zip(rows(), pair, strict=True)) for pair in PAIRS * 2]
    file.write_text("\n".join(map(json.dumps, table)))
    how = {"task": fp.tasks.preference(loss), "tokenizer": models[0].tokenizer, "max_length": 64}
    data = fp.load_dataset(file, **how)
    given = types.SimpleNamespace(
        **{"clients": fp.partition.iid(data["train"], 2), "evaluation": fp.Evaluation()},
        **{"test": data["test"], "validation": None, "task": None, "model": models[0]},
    )
    tables = data_tables(given, models[0].name, models[0].recipe["source"])
    config = configs.resolve(small(model={"name": models[0].name}, **tables))
    again = configs.load_data(config)
    assert explicit(config, again)["data"]["max_length"] == config["data"]["max_length"] == 64
    for name, column in data["train"].columns.items():
        np.testing.assert_array_equal(again["train"].columns[name], column, err_msg=name)


def changed(**columns):
    return lambda model: encoded(model, {**rows(), **columns})


REFUSED = (
    (changed(rejected=["a", None, "b", "c"]), "Row 2 of rows has no 'rejected' answer"),
    (changed(rejected=["a", "b", " ", "c"]), "Row 3 of rows has no 'rejected' answer"),
    (changed(rejected=["No", "a", "4 ", "c"]), "Row 3 of rows has equal answers"),
    (changed(prompt=["a", "b", "c", "d" * 90]), "Row 4 of rows has a prompt of at least 64 tokens"),
    (changed(chosen=[[ASKED]] * 4), "Row 1 of rows needs in 'chosen' an answer"),
    (lambda m: encoded(m, {"chosen": ["a"], "rejected": ["b"]}), "Row 1 of rows needs in 'chosen'"),
    (
        lambda m: encoded(m, {"prompt": ["a"], "completion": ["b"], "label": [True]}),
        'are for [task] loss = "kto"',
    ),
    (
        lambda m: encoded(m, {"prompt": ["a"], "completion": ["b"], "label": ["good"]}, "kto"),
        "Row 1 of rows has the label 'good'",
    ),
    (lambda m: encoded(m, {"prompt": ["a"], "chosen": ["b"]}), "has no pairs of answers"),
)


@pytest.mark.parametrize(("call", "named"), REFUSED)
def test_refusals(models, call, named):
    refused(re.escape(named), call, models[0])


def test_pairs_of_different_prompts_are_left_out(models):
    other = [said("user", "Where?"), said("assistant", "here")]
    columns = {"chosen": [other, [ASKED, ANSWERED]], "rejected": [[ASKED, ANSWERED]] * 2}
    columns["rejected"][1] = [ASKED, said("assistant", "no")]
    with pytest.warns(UserWarning, match="1 of 2 pairs of rows are left out"):
        data = encoded(models[0], columns)
    assert len(data) == 1


def federation(model, loss, **options):
    data = encoded(model, rows(), loss, **options)
    parts = np.array_split(np.arange(len(data), dtype=np.int32), 2)
    return fp.Clients(data, tuple(parts))


@pytest.fixture(scope="module")
def adapted(models):
    """A model whose adapters are not zero, as at the start of a run from another one."""
    model = fp.attach(models[0], fp.lora(rank=2, targets=["q_proj"]))
    rng = np.random.default_rng(0)
    moved = {n: x + rng.normal(0, 0.1, x.shape).astype(x.dtype) for n, x in model.trainable.items()}
    return model.replace(trainable=moved)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
@pytest.mark.sample("dpo")
def test_the_reference_is_the_model_that_a_run_starts_from(adapted, loss):
    clients = federation(adapted, loss)
    run = fp.simulate(
        *(adapted, fp.algorithms.fedavg(optax.adam(1e-2)), clients),
        **{"rounds": 1, "local_steps": 1, "batch_size": 2, "test": clients.data},
        records=fp.Records(progress=False),
    )
    first, last = run.metrics
    # Log-likelihoods of about 100 nats, summed in two programs.
    assert_close(first["test_margin"], 0, atol=1e-4)
    assert_close(first["test_loss"], {"dpo": np.log(2), "kto": 0.5}[loss], rtol=1e-4)
    assert last["test_margin"] > 1e-3
    assert last["test_loss"] < first["test_loss"]


@pytest.mark.parametrize("loss", ["dpo", "kto"])
@pytest.mark.sample("dpo")
def test_a_start_from_the_gradient_reads_the_reference(models, adapted, loss, monkeypatch):
    given, task = [], federation(adapted, loss).data.task
    monkeypatch.setattr(running.peft, "gradient_start", lambda *x, step: given.extend(x[1]))
    how = {"gradient_start": 0.1, "gradient_examples": 4}
    config = {"peft": how, "privacy": {}, "seed": 0, "batch_size": 3}
    running.started(config, adapted, federation(adapted, loss), task)
    assert [batch["reference"].shape for batch in given] == [(3, 2)] * 2
    assert all(np.all(batch["reference"] < 0) for batch in given)
    model = fp.attach(models[0], fp.peft.lora_sb(rank=2, targets=["q_proj"]))
    batches = federation(adapted, loss).sample(4, 3)
    named = "column 'reference', and .* task.prepare"
    refused(named, gradient_start, model, batches, task, step=0.1)


def test_example_level_privacy_is_refused_where_a_row_has_two_examples(adapted):
    how = {
        "privacy": fp.privacy.example(clip=1.0, noise_multiplier=1.0),
        "batch_sampling": "poisson",
        "batch_size": 1,
    }
    plain = fp.algorithms.fedavg(optax.sgd(0.1))
    fp.session(adapted, plain, federation(adapted, "dpo"), **how)
    kto = federation(adapted, "kto")
    refused("texts of several examples", fp.session, adapted, plain, kto, **how)
    refused("packed rows have no room", fp.session, adapted, plain, kto.pack(256))
    for loss, other in (("dpo", "kto"), ("simpo", "kto")):
        task = fp.tasks.preference(other)
        pairs = federation(adapted, loss)
        refused("with the task of the run", fp.session, adapted, plain, pairs, task=task)
        task, single = fp.tasks.preference(loss), federation(adapted, other)
        refused("with the task of the run", fp.session, adapted, plain, single, task=task)
