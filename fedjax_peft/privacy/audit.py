"""An audit of client-level privacy in one run: a lower bound on ε from canary clients.

Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run". A coin decides for
each client whether it takes part as a canary: it then sends a large change of a single entry of the
model, an entry of its own; otherwise it sends nothing new. The released model is looked up at these
entries. The better the scores tell the canaries from the others, the larger ε must be.

An audit cannot prove privacy. It finds mistakes: if the lower bound is above the ε that the
accountant claims, the mechanism gives less privacy than it says.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.arguments import Count, Positive, strict
from fedjax_peft.contracts.privacy import Attack, Federation, Wrapped
from fedjax_peft.contracts.types import Params
from fedjax_peft.contracts.upload import Stages, Upload
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.libraries import install


class Canaries(NamedTuple):
    """Canary clients, and the coins that include them."""

    attack: Attack
    """Makes every client a canary; give it to ``simulate``, together with ``privacy``."""
    included: np.ndarray
    """Whether each client sends its canary, bool ``[clients]``."""
    entries: np.ndarray
    """The entry of each client, int ``[clients]``, an index into all leaves in their order."""
    leaves: Mapping[str, Array]
    """The leaves before training that canaries change."""

    def scores(self, params: Params) -> np.ndarray:
        """Returns how much the entry of each client has grown, float32 ``[clients]``.

        Args:
          params: the leaves after the run, such as ``run.params``.
        """
        grown = [np.asarray(params[name] - start).ravel() for name, start in self.leaves.items()]
        return np.concatenate(grown)[self.entries]

    def epsilon(self, params: Params, delta: float, *, significance: float = 0.05) -> float:
        """Returns a lower bound on the ε of the run.

        Args:
          params: as for :meth:`scores`.
          delta: δ of the guarantee.
          significance: the largest probability of a bound that is wrong.

        Raises:
          InputError: as :func:`lower_bound`.
        """
        scores = self.scores(params)
        return lower_bound(
            scores[self.included], scores[~self.included], delta, significance=significance
        )


@strict
def canaries(
    leaves: Mapping[str, Array], clients: Count, *, strength: Positive = 100.0, seed: int = 0
) -> Canaries:
    """Returns a canary for every client of a federation.

    The algorithm must average the leaves that clients send, as FedAvg does, and the server must
    take over the average. All clients should take part in all rounds: with ``sampling="all"`` the
    bound is best. Some hundred clients are needed: even from perfect scores, the bound at δ = 1e-5
    is 2.5 with 100 clients and 4.3 with 600.

    Args:
      leaves: leaf name -> its value before training: the leaves that every client sends, or a part
        of them. Together they need an entry for each client.
      clients: the number of clients in the federation.
      strength: the length of the change that a canary sends. Choose it far above the clip norm, so
        that a mechanism without clipping is noticed.
      seed: the seed of the coins and the entries.

    Raises:
      InputError: the leaves have too few entries; on use, the uploads do not have these leaves.
    """
    order = {name: jnp.asarray(leaves[name]) for name in sorted(leaves)}
    entries = sum(x.size for x in order.values())
    if clients > entries:
        raise InputError(
            f"{clients} canary clients need an entry each, and the leaves have {entries}: use a"
            " larger model, or fewer clients."
        )
    rng = host_rng(seed, "canaries")
    place = rng.permutation(entries)[:clients]
    included = rng.random(clients) < 0.5

    def apply(algorithm: Algorithm, federation: Federation) -> Wrapped:
        if federation.clients != clients:
            raise InputError(
                f"There are {clients} canaries, and {federation.clients} clients in the federation."
            )

        def send_canary(upload: Upload) -> Upload:
            start, number = upload.client.source.template, upload.client.number
            if not isinstance(upload.value, dict) or not order.keys() <= upload.value.keys():
                raise InputError(
                    f"The clients of {algorithm.name!r} do not send the leaves of the canaries."
                    " Audit 'fedavg', with leaves that it shares."
                )
            size = jnp.where(jnp.asarray(included)[number], strength, 0.0)
            changed = _changed(start, order, jnp.asarray(place)[number], size)
            return upload._replace(value={**start, **changed})

        return Wrapped(algorithm, Stages(sent=(send_canary,)))

    hostile = tuple(np.flatnonzero(included).tolist())
    return Canaries(Attack("canaries", apply, lambda _: hostile), included, place, order)


def _changed(
    template: Mapping[str, Array], order: Mapping[str, Array], entry: Any, size: Any
) -> dict[str, Array]:
    """Returns leaves of which one entry is larger; entries are counted over all leaves."""
    changed, first = {}, 0
    for name, like in order.items():
        here = (jnp.arange(like.size) == entry - first).reshape(like.shape)
        changed[name] = template[name] + (here * size).astype(template[name].dtype)
        first += like.size
    return changed


def lower_bound(
    included: np.ndarray, excluded: np.ndarray, delta: float, *, significance: float = 0.05
) -> float:
    """Returns a lower bound on ε from the scores of canaries, by ``jax-privacy``.

    Args:
      included: the scores of the canaries that took part, ``[n]``.
      excluded: the scores of those that did not, ``[m]``. Each canary took part with probability
        1/2, independently.
      delta: δ of the guarantee.
      significance: the largest probability of a bound that is wrong.

    Raises:
      InputError: ``jax-privacy`` is not installed, a score is NaN, or one of the groups is empty.
    """
    included, excluded = np.asarray(included), np.asarray(excluded)
    for name, scores in (("took part", included), ("did not take part", excluded)):
        if not scores.size:
            raise InputError(f"No canary {name}, so that nothing can be told apart: use more.")
        if unknown := int(np.isnan(scores).sum()):
            raise InputError(
                f"{unknown} of {scores.size} scores of canaries that {name} are NaN, and a bound"
                " from them would say nothing. The model that was looked up is not finite: audit a"
                " run that does not diverge."
            )
    try:
        from jax_privacy.auditing import CanaryScoreAuditor
    except ImportError:
        raise InputError(
            f"Audits of differential privacy use jax-privacy: {install('privacy')}."
        ) from None
    auditor = CanaryScoreAuditor(included, excluded)
    return float(auditor.epsilon_one_run(significance, delta))
