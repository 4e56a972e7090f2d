"""Upload transforms that use all features: memory, state, noise, metrics and bytes."""

import inspect

import jax
import jax.numpy as jnp
import optax
import toy
from internals import clipped, stream
from options import run_options

import fedjax_peft as fp
from fedjax_peft import simulate, transforms

MODEL, ALGORITHM = toy.model(dropout=0), fp.algorithms.fedavg(optax.sgd(0.1))
FEDERATION = toy.clients([7, 4, 12, 1, 9])


def run(given, rounds=2, *, model=MODEL, algorithm=ALGORITHM, federation=FEDERATION, **options):
    """Returns a run of the toy problem; runs that share model and algorithm share programs."""
    options = {"lanes": 3, "batch_size": 4, "eval_every": 9} | options
    options = run_options(transforms=given, **options)
    return simulate(model, algorithm, federation, rounds=rounds, **options)


def upload(value, template, memory=(), rank_mask=None) -> fp.contracts.Upload:
    """Returns the upload of a client that started from the present version."""
    source = fp.contracts.Source((), template, jnp.int32(1))
    client = fp.contracts.Participant(jnp.int32(0), source, rank_mask or {}, jax.random.key(0))
    return fp.contracts.Upload(value, jnp.float32(1), client, template, (), memory)


def noise(key, template, scale):
    """Returns normal noise for every leaf of a dict."""
    return {n: scale * jax.random.normal(stream(key, n), x.shape) for n, x in template.items()}


def feedback(share=0.6, strength=0.01) -> fp.contracts.Transform:
    """Sends a share of change and memory with noise, and keeps the rest for the next round.

    The strength of the clients' noise follows the cohort's mean norm, which the server broadcasts.
    The server adds noise too, and the wire takes half of the bytes.
    """

    def client(update, memory, received, key):
        total = jax.tree.map(jnp.add, update, memory)
        added = noise(key, total, strength * received["length"])
        sent = {n: share * x + added[n] for n, x in total.items()}
        return fp.contracts.Encoded(
            sent, jax.tree.map(jnp.subtract, total, sent), {"length": fp.tree.norm(total)}
        )

    def server(aggregate, state, measured, context):
        accepted, lengths = measured.accepted, measured.values["length"]
        mean = jnp.sum(jnp.where(accepted, lengths, 0)) / context.participants
        added = noise(context.key, aggregate, strength)
        new = {"length": (state["length"] + mean) / 2, "rounds": state["rounds"] + 1}
        metrics = {"feedback_length": new["length"]}
        return fp.contracts.Decoded({n: x + added[n] for n, x in aggregate.items()}, new, metrics)

    return fp.contracts.Transform(
        "feedback",
        client,
        init=lambda template: {"length": jnp.ones(()), "rounds": jnp.zeros((), jnp.int32)},
        broadcast=lambda state: {"length": state["length"]},
        memory=lambda template: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), template),
        server=server,
        changes_aggregate=True,
        wire=lambda template, wires: {n: w._replace(bits=w.bits // 2) for n, w in wires.items()},
    )


def record() -> fp.contracts.Transform:
    """Does not change uploads; reports the largest norm of the changes that it gets."""

    def client(update, memory, received, key):
        return fp.contracts.Encoded(update, memory, fp.tree.norm(update))

    def server(aggregate, state, measured, context):
        largest = jnp.max(jnp.where(measured.accepted, measured.values, 0))
        return fp.contracts.Decoded(aggregate, state, {"largest_norm": largest})

    return fp.contracts.Transform("record", client, server=server)


def clip_by_state() -> fp.contracts.Transform:
    """``clip_norm`` whose largest norm is its state, so that one program runs any of them.

    It reports the largest norm that it sends.
    """

    def client(update, memory, received, key):
        sent = clipped(update, fp.tree.norm(update), received)
        return fp.contracts.Encoded(sent, memory, fp.tree.norm(sent))

    return record()._replace(
        name="clip_by_state", client=client, init=lambda template: jnp.float32(jnp.inf)
    )


def ones() -> fp.contracts.Transform:
    """Sends 1 in every entry, also where a change is not finite."""
    return fp.contracts.Transform(
        "ones", lambda update, *_: fp.contracts.Encoded(jax.tree.map(jnp.ones_like, update))
    )


REQUIRED = {"max_norm": 0.2, "share": 0.3, "rank": 1}
"""A value for each parameter of a built-in transform that has no default."""


def example(name, **options):
    """Returns a built-in transform by its name; options that it does not have are left out."""
    function = getattr(transforms, name)
    known = inspect.signature(function).parameters
    needed = {n for n, p in known.items() if p.default is p.empty}
    assert needed <= REQUIRED.keys(), f"add {needed - REQUIRED.keys()} of {name} to REQUIRED"
    given = {n: REQUIRED[n] for n in needed}
    return function(**given | {n: x for n, x in options.items() if n in known})


def compressors(*, with_option=None):
    """Returns the names of the built-in transforms that make uploads smaller.

    Args:
      with_option: only those that have this parameter.
    """
    made = {name: example(name) for name in transforms.__all__}
    names = [n for n, t in made.items() if t.wire is not None and not t.changes_aggregate]
    parameters = {n: inspect.signature(getattr(transforms, n)).parameters for n in names}
    return [n for n in names if with_option is None or with_option in parameters[n]]
