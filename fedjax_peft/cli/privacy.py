"""The text that ``fedjax-peft privacy`` prints: noise for an ε, or the ε of a noise, in words."""

import math
import textwrap
from typing import Any, Literal, NamedTuple

from fedjax_peft.contracts import Federation
from fedjax_peft.privacy import guarantees, statements
from fedjax_peft.privacy.accounting import Accountant, Neighbours
from fedjax_peft.support.errors import InputError, nearest


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
    """How clients are drawn; for examples, ``batch_sampling``."""
    steps: int = 1
    """Local steps of a client in a round, for examples."""
    neighbours: Neighbours | None = None

    @property
    def federation(self) -> Federation:
        """The facts that the accountant needs."""
        if self.unit == "client":
            work: dict[str, Any] = dict.fromkeys(_WORK, 1)
            facts = (self.population, self.drawn, self.sampling)
            return Federation(*facts, batch_sampling="shuffled", **work)
        # One client, the smallest, which takes part in every round.
        return Federation(
            *(1, 1, "all"),
            batch_size=self.drawn,
            batch_sampling=self.sampling,
            most_steps=self.steps,
            most_passes=-(-self.steps // -(-self.population // self.drawn)),
            fewest_examples=self.population,
        )


_WORK = ("batch_size", "most_steps", "most_passes", "fewest_examples")
"""Facts about local work, on which a guarantee for clients does not depend."""
_SAMPLINGS = {
    "client": ("poisson", "uniform", "round_robin", "all"),
    "example": ("poisson", "shuffled"),
}
"""The ways in which runs draw clients, and examples."""


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
    known = _SAMPLINGS[plan.unit]
    if plan.sampling not in known:
        raise InputError(
            f"No run draws {plan.unit}s by --sampling {plan.sampling}, so that it has no epsilon."
            f" {nearest(plan.sampling, known)}"
        )
    if plan.unit == "example" and plan.neighbours not in (None, "replace_special"):
        raise InputError(
            f"--neighbours {plan.neighbours} is for clients. The guarantee for examples compares"
            " data sets of which one has an empty example (replace_special)."
        )
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
    facts = (plan.delta, plan.federation, plan.rounds)
    options: dict[str, Any] = {"accountant": accountant}
    epsilon_of: Any = guarantees.example_epsilon
    noise_of: Any = guarantees.example_noise_multiplier
    if plan.unit == "client":
        epsilon_of, noise_of = guarantees.client_epsilon, guarantees.client_noise_multiplier
        options["neighbours"] = plan.neighbours
    try:
        if plan.epsilon is None:
            return float(epsilon_of(plan.noise_multiplier, *facts, **options))
        return float(noise_of(plan.epsilon, *facts, **options))
    except InputError:
        if accountant == "rdp":
            raise
        return None


def _meaning(plan: Plan, noise: float) -> list[str]:
    """Returns paragraphs on the noise, on the guarantee, and on a δ that is too large."""
    mean = f"{noise / plan.drawn:.4g} C"
    if plan.unit == "client":
        words = statements.composition_in_words(plan.federation, plan.neighbours)
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
            f' delta = {plan.delta:g}}}, batch_sampling = "{plan.sampling}" and batch_size ='
            f" {plan.drawn}."
        )
        words = statements.example_in_words(plan.federation)
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
