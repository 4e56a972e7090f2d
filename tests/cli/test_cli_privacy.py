"""``fedjax-peft privacy``: noise for an ε, and the ε of a noise."""

import contextlib
import re

import optax
import pytest
import toy
from closeness import approx
from internals import accounting, federation_of, main, schedule_of

import fedjax_peft as fp

EXAMPLES = ["--epsilon", "2", "--unit", "example", "--rounds", "5"]
EXAMPLES += ["--examples", "200", "--batch-size", "8"]
FEW = ["--rounds", "50", "--clients", "100", "--per-round", "10"]


def said(capsys, *words):
    assert main(["privacy", *map(str, words)]) == 0
    return capsys.readouterr().out


def numbers(text):
    return {name: float(x) for name, x in re.findall(r"by (RDP|PLD): ([\d.]+)", text)}


def test_the_noise_of_an_epsilon(capsys):
    text = said(capsys, "--epsilon", 0.5, "--delta", 1e-3, *FEW)
    found = numbers(text)
    expected = accounting.noise_multiplier(0.5, 1e-3, 50, 0.1)
    assert 0 <= found["RDP"] - expected <= 1e-4, "rounded up"
    assert found["PLD"] < found["RDP"]
    assert f"noise_multiplier = {found['RDP']}" in " ".join(text.split())
    assert f"over 10 clients this is {found['RDP'] / 10:.4g} C" in " ".join(text.split())
    assert "Poisson sampling" in text
    assert "add or remove one" in text
    assert "Note" not in text


def test_the_noise_of_the_printed_config_is_enough(capsys):
    """It is 11.5101; the epsilon of 11.51 is above 0.2."""
    words = ["--rounds", 1, "--clients", 10, "--per-round", 10, "--sampling", "all"]
    text = " ".join(said(capsys, "--epsilon", 0.2, "--delta", 1e-3, *words).split())
    (noise,) = re.findall(r"noise_multiplier = ([\d.]+)", text)
    assert f"standard deviation {noise} C" in text
    event = accounting.gaussian_event(float(noise), 1)
    assert 0.1999 < accounting.epsilon(event, 1e-3) <= 0.2


def test_the_epsilon_of_a_noise(capsys):
    text = said(capsys, "--noise-multiplier", 1.500004, "--delta", 1e-3, *FEW)
    assert "noise_multiplier = 1.500004," in " ".join(text.split())
    for name, x in numbers(text).items():
        event = accounting.gaussian_event(1.500004, 50, 0.1)
        assert 0 <= x - accounting.epsilon(event, 1e-3, name.lower()) <= 1e-4


def test_example_level_counts_local_steps_and_names_examples(capsys):
    words = ["--examples", 200, "--batch-size", 8, "--steps", 3, "--unit", "example"]
    text = said(capsys, "--noise-multiplier", 1, "--delta", 1e-3, "--rounds", 2, *words)
    event = accounting.gaussian_event(1.0, 6, 0.04)
    assert numbers(text)["RDP"] == approx(accounting.epsilon(event, 1e-3), abs=1e-4)
    text = " ".join(text.split())
    assert 'batch_sampling = "poisson" and batch_size = 8' in text
    assert "an empty example, which contributes nothing" in text
    assert "client sends" not in text


@pytest.mark.slow
def test_the_epsilon_of_examples_is_that_of_a_run(capsys):
    """Shuffled: an example of 80 is in one of 10 batches of a pass, and 15 steps are two passes."""
    words = ["--examples", 80, "--batch-size", 8, "--steps", 15, "--unit", "example"]
    words += ["--noise-multiplier", 1.1, "--delta", 1e-5, "--rounds", 10, "--sampling", "shuffled"]
    text = said(capsys, *words)
    sizes = {"batch_size": 8, "epochs": 1, "local_steps": 15, "system": fp.System()}
    options = {"clients_per_round": None, "sampling": "uniform", **sizes}
    clients = toy.clients((80,))
    schedule = schedule_of(clients, batch_sampling="shuffled", **options)
    facts = federation_of(schedule, clients.data, fp.algorithms.fedavg(optax.sgd(0.1)))
    run = fp.privacy.example(1.0, 1.1, delta=1e-5).guarantee(facts, 10).epsilon
    assert run == approx(accounting.epsilon(accounting.gaussian_event(1.1, 20), 1e-5))
    assert run == approx(26.5, abs=0.01)
    assert numbers(text)["RDP"] == approx(run, abs=1e-4)
    assert 'batch_sampling = "shuffled"' in " ".join(text.split())


def test_a_sampling_that_is_not_amplified_and_one_that_pld_does_not_know(capsys):
    words = ["--noise-multiplier", 8, "--delta", 1e-3, *FEW, "--sampling", "uniform"]
    assert "nothing is amplified" in " ".join(said(capsys, *words).split())
    text = said(capsys, *words, "--neighbours", "replace_one")
    assert "PLD: does not know this sampling" in text


def test_no_noise_is_no_guarantee_and_a_large_delta_is_noted(capsys):
    text = said(capsys, "--noise-multiplier", 0, "--delta", 0.02, *FEW)
    assert "RDP: no guarantee" in text
    assert "Note: delta is not below 1/100" in text


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--epsilon", "2", "--rounds", "5"], "--unit client needs --clients"),
        (["--epsilon", "2", *FEW, "--unit", "example"], "needs --examples"),
        (["--epsilon", "2", *FEW, "--sampling", "shuffled"], "No run draws clients by --sampling"),
        ([*EXAMPLES, "--sampling", "uniform"], "No run draws examples by --sampling uniform"),
        ([*EXAMPLES, "--sampling", "round_robin"], "Known: poisson, shuffled"),
        ([*EXAMPLES, "--neighbours", "replace_one"], "--neighbours replace_one is for clients"),
        (["--epsilon", "-2", *FEW], "epsilon = -2.0 "),
        (["--epsilon", "2", *FEW, "--per-round", "101"], "101 of 100 clients cannot be drawn"),
    ],
)
def test_bad_input_is_one_sentence(capsys, words, complaint):
    with contextlib.suppress(SystemExit):  # argparse
        assert main(["privacy", *words]) == 2
    assert complaint in capsys.readouterr().err
