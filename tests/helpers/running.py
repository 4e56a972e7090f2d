"""Short runs of the toy problem. What a test leaves out has a small value, which others share.

A model and an algorithm that are the same objects in all runs of a file compile once.
"""

import functools

import optax
import toy
from closeness import assert_close
from options import run_options

import fedjax_peft as fp

SIZES = (7, 4, 12, 1, 9)
CLIENTS = toy.clients(SIZES)
FEDAVG = fp.algorithms.fedavg(optax.sgd(0.1))
PRIVATE = fp.algorithms.fedavg(optax.sgd(0.1), head="private")
model = functools.cache(toy.model)


def run(algorithm=FEDAVG, *, clients=CLIENTS, **options):
    """Returns a run, by default of two rounds with batches of four."""
    options = {"rounds": 2, "batch_size": 4, "progress": False, **options}
    bound = options.pop("model", None) or model()
    return fp.simulate(bound, algorithm, clients, **run_options(**options))


def rows(result, *without):
    """Returns the rows of a run without wall-clock times and the fields that are named."""
    return [{k: v for k, v in row.items() if k not in ("time", *without)} for row in result.metrics]


def leaves(result):
    """Returns the server's leaves and those of all clients, by name."""
    return {**result.params, **{f"private {n}": x for n, x in result.client_state.items()}}


def assert_same_models(one, other, atol=1e-6):
    """Raises if the models of two runs differ by more than rounding, those of clients included."""
    assert leaves(one).keys() == leaves(other).keys()
    for name, x in leaves(one).items():
        assert_close(x, leaves(other)[name], rtol=0, atol=atol, err_msg=name)


def interrupt(round_index):
    """Returns an ``on_round`` that interrupts the run after this round."""

    def on_round(row):
        if row["round"] == round_index:
            raise KeyboardInterrupt

    return on_round
