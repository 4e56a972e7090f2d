"""The text that ``fedjax-peft privacy`` prints: noise for an ε, or the ε of a noise, in words."""

import math
import textwrap
from typing import Any, Literal, NamedTuple

from fedjax_peft.errors import InputError
from fedjax_peft.privacy import accounting
from fedjax_peft.privacy.accounting import Accountant, Neighbours
from fedjax_peft.typing import Federation

__all__ = ["Plan", "plan_text"]


class Plan(NamedTuple):
    """A private run that is planned."""

    rounds: int
    population: int
    """The number of clients; for examples, those of the smallest client."""
    drawn: int
    """Clients in a round; for examples, those in a batch."""
    delta: float
    epsilon: float | None = None
    """The ε to reach; None if ``noise_multiplier`` is given."""
    noise_multiplier: float | None = None
    unit: Literal["client", "example"] = "client"
    sampling: str = "poisson"
    steps: int = 1
    """Local steps of a client in a round, for examples."""
    neighbours: Neighbours | None = None

    @property
    def federation(self) -> Federation:
        """The facts that the accountant needs. Examples are drawn as clients are."""
        return Federation(
            clients=self.population,
            per_round=self.drawn,
            sampling=self.sampling,
            batch_size=1,
            batch_sampling="shuffled",
            most_steps=1,
            most_passes=1,
            fewest_examples=1,
        )

    @property
    def compared(self) -> Neighbours:
        """The neighbours; the numbers of examples are public, so that one is emptied."""
        if self.neighbours is not None:
            return self.neighbours
        public = self.unit == "example"
        return "replace_special" if public else accounting.client_neighbours(self.federation)

    @property
    def sums(self) -> int:
        """The number of noisy sums that are composed."""
        return self.rounds * (self.steps if self.unit == "example" else 1)


def plan_text(plan: Plan) -> str:
    """Returns the noise multiplier or ε by both accountants, and what they mean.

    Raises:
      InputError: a number is outside of its range, or neither or both of ε and noise are given.
    """
    if (plan.epsilon is None) == (plan.noise_multiplier is None):
        raise InputError("Give one of --epsilon and --noise-multiplier.")
    if not 0 < plan.drawn <= plan.population:
        what = "clients" if plan.unit == "client" else "examples"
        raise InputError(f"{plan.drawn} of {plan.population} {what} cannot be drawn.")
    found = {name: _found(plan, name) for name in ("rdp", "pld")}
    asked = plan.noise_multiplier is not None
    noise = plan.noise_multiplier if asked else found["rdp"]
    assert noise is not None
    noise = math.ceil(1e4 * noise) / 1e4
    head = "epsilon" if asked else "noise multiplier"
    given = f"noise multiplier {plan.noise_multiplier:g}" if asked else f"epsilon {plan.epsilon:g}"
    steps = f" of {plan.steps:,} local steps" if plan.unit == "example" else ""
    lines = [f"{given}, delta {plan.delta:g}, {plan.rounds:,} rounds{steps}", ""]
    lines += [f"  {head} by {name.upper()}: {_number(x)}" for name, x in found.items()]
    lines += ["", *map(_paragraph, _meaning(plan, noise))]
    return "\n".join(lines)


def _found(plan: Plan, accountant: Accountant) -> float | None:
    """Returns the answer of an accountant; None if it does not know this sampling."""
    facts = (plan.delta, plan.federation, plan.sums)
    options: dict[str, Any] = {"accountant": accountant, "neighbours": plan.compared}
    try:
        if plan.epsilon is None:
            assert plan.noise_multiplier is not None
            return accounting.client_epsilon(plan.noise_multiplier, *facts, **options)
        return accounting.client_noise_multiplier(plan.epsilon, *facts, **options)
    except InputError:
        if accountant == "rdp":
            raise
        return None


def _meaning(plan: Plan, noise: float) -> list[str]:
    """Returns paragraphs on the noise, on the guarantee, and on a δ that is too large."""
    words = accounting.composition_in_words(plan.federation, plan.compared)
    mean = f"{noise / plan.drawn:.4g} C"
    if plan.unit == "client":
        where = (
            f"The server clips what a client sends to the norm C, and adds Gaussian noise of"
            f" standard deviation {noise:.4g} C to every entry of the sum of a round. On the mean"
            f" over {plan.drawn:,} clients this is {mean}. In a config:"
            f' privacy = {{name = "central", clip = C, noise_multiplier = {noise:.4g},'
            f' delta = {plan.delta:g}}} and sampling = "{plan.sampling}".'
        )
    else:
        where = (
            f"Each client clips the gradient of an example to the norm C, and adds Gaussian noise"
            f" of standard deviation {noise:.4g} C to every entry of the sum of a batch. On the"
            f" mean over {plan.drawn:,} examples this is {mean}. In a config:"
            f' privacy = {{name = "example", clip = C, noise_multiplier = {noise:.4g},'
            f' delta = {plan.delta:g}}}, batch_sampling = "poisson" and batch_size = {plan.drawn}.'
        )
        words = words.replace("client", "example").replace("federations", "data sets")
        words = words.replace("sends zeros instead", "counts as zero instead")
        words = words.replace("Each round", "Each local step").replace("round", "step")
    texts = [where, f"The guarantee is (epsilon, delta)-differential privacy. {words}"]
    texts.append(
        "RDP composes Rényi divergences: fast, and an upper bound. PLD composes privacy-loss"
        " distributions: slower, and nearly exact. Rows of metrics use RDP by default."
    )
    if plan.delta * plan.population >= 1:
        texts.append(
            f"Note: delta is not below 1/{plan.population:,}. A mechanism that publishes one"
            f" {plan.unit}'s data would pass with it. Choose a smaller delta."
        )
    return texts


def _number(value: float | None) -> str:
    """Returns a number, rounded up: a smaller noise would not be enough."""
    if value is None:
        return "does not know this sampling"
    return f"{math.ceil(1e4 * value) / 1e4:.4f}" if math.isfinite(value) else "no guarantee"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 92) + "\n"
