"""``run --explain`` and ``list``: the meaning of keys and names, from the docstrings."""

import pytest
from internals import cli, config, explain, in_words

KEYS = config.all_keys()


def test_every_key_is_documented():
    """An argument that a config can set needs a docstring."""
    assert len(KEYS) > 200
    missing = [f"{key.dotted} of {key.owner.__name__}" for key in KEYS if not explain.meaning(key)]
    assert missing == []
    # A reference to another argument is not an explanation.
    assert [key.dotted for key in KEYS if explain.meaning(key).startswith("see ")] == []


def test_every_key_has_a_type_and_a_default():
    """Both are in words, without Python's notation."""
    for key in KEYS:
        text = f"{in_words(key.kind)}, {explain.default_text(key)}"
        assert not any(word in text for word in ("None", "typing", "Ellipsis", "True", "()")), text


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("rounds", ["rounds: whole number, must be given\n    communication rounds."]),
        # By reference: the methods that are LoRA with something more share its words.
        (
            "peft.rank",
            ["8 (of dora, dual_lora, lora, lora_experts, lora_sum, lora", "the number"],
        ),
        ("mu", ["(of fedprox)", "(of moon)", "(of fedmcp)"]),
        ("data.columns", ["table of texts, none by default", "our column name"]),
        (
            "seed",
            ["seed: whole number, default 0", "partition.seed: whole number, by default that of"],
        ),
        ("model.seed", ["by default that of the run"]),
        ("schedule.rounds", ["by default that of the run"]),
        ("client_ranks", ["list of whole numbers"]),
        ("sampling", ['"uniform" or "size" or "poisson"', 'default "uniform"']),
        ("client_holdout", ["held out"]),  # documented as a field
        ("peft.activation", ["(of houlsby)", "Hugging Face name"]),
        ("peft", ["  dora "]),
        ("peft.name", ["  dora "]),
        ("time", ["bandwidth_up"]),
        ("algorithm.ditto", ["the strength of the pull"]),
    ],
)
def test_explain(word, parts):
    """The word is a key, the last part of a key, or a table."""
    text = explain.explain(word)
    for part in parts:
        assert part in text
    assert "``" not in text
    assert ":func:" not in text


def test_explain_needs_no_config(capsys):
    """``explain``, and ``--explain`` of ``run``, answer without a config file."""
    assert cli.main(["explain", "peft.rank"]) == 0
    assert capsys.readouterr().out.startswith("peft.rank: whole number from 1 up, default 8")
    assert cli.main(["explain", "rnk"]) == 2
    assert "Did you mean 'rank'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        cli.main(["run", "--explain", "peft.rank"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("peft.rank: whole number from 1 up, default 8")
    assert cli.main(["run", "--explain", "rnk"]) == 2
    assert "Did you mean 'rank'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "there", "not_there"),
    [
        (["algorithms"], ["  ditto "], ["  lora "]),
        (
            ["algorithm", "ditto"],
            ["lam: number from 0 up, default 0.1", 'name = "ditto"'],
            ["fedavg"],
        ),
        (["algorithm", "drift"], ["SCAFFOLD"], ["ditto"]),
        (["optimizers"], ["  adamw "], ["  ditto "]),
        (["data", "film"], ["  sst2 "], ["  mrpc "]),
        (["datasets", "film"], ["  sst2 "], ["  mrpc "]),
        (["methods", "prompt_tuning"], ["tokens: whole number"], ["lora"]),
        (["keys", "deadline"], ["system.deadline: number, none by default"], ["batch_size"]),
        (["MiniLM"], ["minilm-l6"], ["sst2"]),
    ],
    ids=" ".join,
)
def test_list_can_be_filtered(capsys, words, there, not_there):
    """The words are a section, a name, or a part of a name."""
    assert cli.main(["list", *words]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in there), printed
    assert not any(text in printed for text in not_there), printed


def test_list_names_the_nearest_for_misspelt_words(capsys):
    assert cli.main(["list", "algorithm", "dito"]) == 2
    assert "'ditto'" in capsys.readouterr().err
    assert cli.main(["list", "algorythms"]) == 2
    assert "'algorithm'" in capsys.readouterr().err
