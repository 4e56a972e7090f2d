"""Privacy of clients and every algorithm: it fits, or it is refused.

Rounds are traced, not run: ``test_algorithms_all.py`` and ``tests/privacy`` run some.
"""

import jax
import jax.numpy as jnp
import pytest
import toy
from test_algorithms_all import NAMES, PRIVACY_REFUSED, clients_of, make, model_of

from fedjax_peft import privacy
from fedjax_peft.contracts import Federation
from fedjax_peft.engine.round import build_round
from fedjax_peft.engine.setup import Setup
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.random import stream
from fedjax_peft.numerics.roles import assign_roles
from fedjax_peft.support.errors import InputError
from fedjax_peft.tasks import classification

QUICK = ("fedavg", "fedavg_fra", "hetlora", "scaffold")


def traced(mechanism, name):
    """Returns the shapes of what a private round returns."""
    algorithm, model, federation = make(name), model_of(name), clients_of(name)
    clients = len(federation)
    facts = Federation(clients, clients, "all", 4, "shuffled", 3, 1, 1)
    algorithm = mechanism(0.5, 1.0).protect(algorithm, facts)
    engine = toy.Engine(algorithm, federation, per_round=clients, lanes=3, bound=model)
    fixed = tree.select(model.trainable, assign_roles(model.kinds, algorithm.roles)["fixed"])
    plan = engine.plan(engine.schedule.cohort(1))
    round_ = build_round(Setup(algorithm, model.apply, classification(), {}, {}, clients))
    state = engine.session.init(0).on_device()
    inputs = (fixed, {}, dict(federation.data.columns), state, plan, stream(0, "clients"))
    return state, jax.eval_shape(round_, model.frozen, *inputs, jnp.int32(1))


def marks(place, name):
    """Returns the marks of a pair: an algorithm is tried with one mechanism, and a few with all."""
    if name in QUICK:
        return ()
    return (pytest.mark.slow,) if NAMES.index(name) % 3 == place else (pytest.mark.exhaustive,)


MECHANISMS = (privacy.central, privacy.local, privacy.distributed)
PAIRS = [pytest.param(m, n, marks=marks(i, n)) for i, m in enumerate(MECHANISMS) for n in NAMES]


@pytest.mark.parametrize(("mechanism", "name"), PAIRS)
def test_an_algorithm_fits_the_noise_of_a_mechanism_or_is_refused(mechanism, name):
    if name in PRIVACY_REFUSED:
        with pytest.raises(InputError, match=PRIVACY_REFUSED[name]):
            traced(mechanism, name)
        return
    state, result = traced(mechanism, name)
    shapes = jax.eval_shape(lambda: state)
    assert jax.tree.structure(result.state) == jax.tree.structure(shapes)
    for new, old in zip(jax.tree.leaves(result.state), jax.tree.leaves(shapes), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
    assert "privacy_noise_std" in result.aggregation
