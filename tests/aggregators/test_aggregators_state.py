"""The state of an aggregator in a session: it goes from round to round and into checkpoints."""

import functools

import jax
import numpy as np
import optax
import toy
from internals import Cohort, saved_parts, with_saved_parts

import fedjax_peft as fp
from fedjax_peft import aggregators


def counting():
    """Returns the mean that counts its rounds and records one random number a round."""
    mean = aggregators.mean(error=False)

    def finish(total, template, context, state):
        done = mean.finish(total, template, context, ())
        noise = jax.random.uniform(context.key)
        return done._replace(metrics={"noise": noise}, state={"rounds": state["rounds"] + 1})

    return mean._replace(name="counting", finish=finish, init=lambda _: {"rounds": np.float32(0)})


@functools.cache
def engine():
    algorithm = fp.algorithms.fedavg(optax.sgd(0.1), aggregator=counting())
    return toy.Engine(algorithm, toy.clients((3, 4)), per_round=2, lanes=2)


def test_a_state_goes_on_is_saved_and_rests_in_a_round_without_uploads():
    session = engine().session
    state, first = session.step(session.init(0))
    assert float(state.aggregator_state["rounds"]) == 1
    restored = with_saved_parts(session.init(0), jax.device_get(saved_parts(state)))
    state, second = session.step(restored._replace(round_index=1))
    assert float(state.aggregator_state["rounds"]) == 2
    assert float(first.aggregation["noise"]) != float(second.aggregation["noise"])
    nobody = engine().plan(Cohort([], [], []))
    result = session.program(nobody)(state, nobody, 3)
    assert float(result.state.aggregator_state["rounds"]) == 2
