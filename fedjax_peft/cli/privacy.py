"""The command ``privacy``: noise for an ε, or the ε of a noise, in words."""

import argparse
import math
import textwrap
from typing import Any

from fedjax_peft.contracts import Federation
from fedjax_peft.privacy import guarantees, statements
from fedjax_peft.privacy.accounting import Accountant
from fedjax_peft.support.display import counted
from fedjax_peft.support.errors import InputError, nearest

_WORK = ("batch_size", "most_steps", "most_passes", "fewest_examples")
"""Facts about local work, on which a guarantee for clients does not depend."""
_SAMPLINGS = {
    "client": ("poisson", "uniform", "round_robin", "all"),
    "example": ("poisson", "shuffled"),
}
"""The ways in which runs draw clients, and examples."""


def privacy(options: argparse.Namespace) -> None:
    """Prints the noise multiplier or ε by both accountants, and what they mean.

    Raises:
      InputError: a number is outside of its range.
    """
    of_clients = options.unit == "client"
    names = ("clients", "per_round") if of_clients else ("examples", "batch_size")
    for name in names:
        if getattr(options, name) is None:
            options.parser.error(f"--unit {options.unit} needs --{name.replace('_', '-')}")
    # The clients, or the examples of the smallest one; and how many of them are drawn.
    options.population, options.drawn = (getattr(options, name) for name in names)
    _check(options)
    found = {name: _found(options, name) for name in ("rdp", "pld")}
    asked = options.noise_multiplier is not None
    noise = options.noise_multiplier
    if not asked:
        assert found["rdp"] is not None, "RDP knows every sampling, or has raised"
        noise = _rounded_up(found["rdp"])
    given = (
        f"noise multiplier {options.noise_multiplier:g}"
        if asked
        else f"epsilon {options.epsilon:g}"
    )
    steps = "" if of_clients else f" of {counted(options.steps, 'local step')}"
    print(f"{given}, delta {options.delta:g}, {counted(options.rounds, 'round')}{steps}\n")
    for name, x in found.items():
        print(f"  {'epsilon' if asked else 'noise multiplier'} by {name.upper()}: {_number(x)}")
    print()
    for text in _meaning(options, noise):
        print(textwrap.fill(text, 92) + "\n")


def _check(options: argparse.Namespace) -> None:
    """Raises InputError for a sampling or neighbours that no run has."""
    population, drawn, unit = options.population, options.drawn, options.unit
    if not 0 < drawn <= population:
        raise InputError(f"{drawn} of {population} {unit}s cannot be drawn.")
    if options.sampling not in _SAMPLINGS[unit]:
        raise InputError(
            f"No run draws {unit}s by --sampling {options.sampling}, so that it has no epsilon."
            f" {nearest(options.sampling, _SAMPLINGS[unit])}"
        )
    if unit == "example" and options.neighbours not in (None, "replace_special"):
        raise InputError(
            f"--neighbours {options.neighbours} is for clients. The guarantee for examples compares"
            " data sets of which one has an empty example (replace_special)."
        )


def _federation(options: argparse.Namespace) -> Federation:
    """Returns the facts that the accountant needs."""
    if options.unit == "client":
        work: dict[str, Any] = dict.fromkeys(_WORK, 1)
        facts = (options.population, options.drawn, options.sampling)
        return Federation(*facts, batch_sampling="shuffled", **work)
    # One client, the smallest, which takes part in every round.
    batches = -(-options.population // options.drawn)
    return Federation(
        *(1, 1, "all"),
        batch_size=options.drawn,
        batch_sampling=options.sampling,
        most_steps=options.steps,
        most_passes=-(-options.steps // batches),
        fewest_examples=options.population,
    )


def _found(options: argparse.Namespace, accountant: Accountant) -> float | None:
    """Returns the answer of an accountant; None if it does not know this sampling."""
    facts = (options.delta, _federation(options), options.rounds)
    how: dict[str, Any] = {"accountant": accountant}
    epsilon_of: Any = guarantees.example_epsilon
    noise_of: Any = guarantees.example_noise_multiplier
    if options.unit == "client":
        epsilon_of, noise_of = guarantees.client_epsilon, guarantees.client_noise_multiplier
        how["neighbours"] = options.neighbours
    try:
        if options.epsilon is None:
            return float(epsilon_of(options.noise_multiplier, *facts, **how))
        return float(noise_of(options.epsilon, *facts, **how))
    except InputError:
        if accountant == "rdp":
            raise
        return None


def _meaning(options: argparse.Namespace, noise: float) -> list[str]:
    """Returns paragraphs on the noise, on the guarantee, and on a δ that is too large."""
    mean = f"{noise / options.drawn:.4g} C"
    if options.unit == "client":
        words = statements.composition_in_words(_federation(options), options.neighbours)
        where = (
            f"The server clips what a client sends to the norm C, and adds Gaussian noise of"
            f" standard deviation {noise} C to every entry of the sum of a round. On the mean"
            f" over {options.drawn:,} clients this is {mean}. In a config:"
            f' privacy = {{name = "central", clip = C, noise_multiplier = {noise},'
            f' delta = {options.delta}}} and sampling = "{options.sampling}".'
        )
    else:
        where = (
            f"Each client clips the gradient of an example to the norm C, and adds Gaussian noise"
            f" of standard deviation {noise} C to every entry of the sum of a batch. On the"
            f" mean over {options.drawn:,} examples this is {mean}. In a config:"
            f' privacy = {{name = "example", clip = C, noise_multiplier = {noise},'
            f' delta = {options.delta}}}, batch_sampling = "{options.sampling}" and batch_size ='
            f" {options.drawn}."
        )
        words = statements.example_in_words(_federation(options))
    texts = [where, f"The guarantee is (epsilon, delta)-differential privacy. {words}"]
    texts.append(
        "RDP composes Rényi divergences: fast, and an upper bound. PLD composes privacy-loss"
        " distributions: slower, and nearly exact. Rows of metrics use RDP by default."
    )
    if options.delta * options.population >= 1:
        texts.append(
            f"Note: delta is not below 1/{options.population:,}. A mechanism that publishes one"
            f" {options.unit}'s data would pass with it. Choose a smaller delta."
        )
    return texts


def _number(value: float | None) -> str:
    """Returns a number, rounded up: a smaller noise would not be enough."""
    if value is None:
        return "does not know this sampling"
    return f"{_rounded_up(value):.4f}" if math.isfinite(value) else "no guarantee"


def _rounded_up(value: float) -> float:
    """Returns a number rounded up to four decimals."""
    return math.ceil(1e4 * value) / 1e4
