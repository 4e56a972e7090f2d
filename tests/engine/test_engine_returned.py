"""Functions of a user that return something of another form than their contract says."""

import jax
import jax.numpy as jnp
import optax
import pytest
import toy
from refusals import refused

import fedjax_peft as fp

PLAIN = fp.algorithms.fedavg(optax.sgd(0.1))
FIRST = "head.bias"


def short(leaves):
    """Returns leaves that would be broadcast to the right shapes without a word."""
    return jax.tree.map(lambda x: x[:1], leaves)


def fewer(leaves):
    return {name: x for name, x in leaves.items() if name != FIRST}


def working(**changed):
    """Returns FedAvg with other results of some of the client's functions."""

    def client(context):
        inner = PLAIN.client(context)

        def function(name):
            own, change = getattr(inner, name), changed.get(name, lambda result: result)
            return lambda *arguments: change(own(*arguments))

        return inner._replace(**{name: function(name) for name in inner._fields})

    return PLAIN._replace(name="mine", client=client)


def finishing(change, **fields):
    plain = PLAIN.aggregator

    def finish(*arguments):
        return change(plain.finish(*arguments))

    return fp.algorithms.fedavg(
        optax.sgd(0.1), aggregator=plain._replace(name="mine", finish=finish, **fields)
    )


def serving(change):
    update = PLAIN.server.update
    server = PLAIN.server._replace(update=lambda *arguments: change(update(*arguments)))
    return PLAIN._replace(name="mine", server=server)


def sending(client, **fields):
    transform = fp.contracts.Transform("mine", client, **fields)
    return {"algorithm": PLAIN, "transforms": transform}


def forward(frozen, trainable, batch, key, train):
    return batch["x"] @ trainable["head.kernel"]


BARE = fp.Model(forward, {}, {"head.kernel": jnp.zeros((5, 4))}, {"head.kernel": "head"}, None)

WRONG = {
    "step: None": (working(step=lambda r: None), r"`step`.*pair \(state, metrics\).*None"),
    "step: a number": (working(step=lambda r: (r[0], {"loss": 1.0})), "pairs.*'loss' is not"),
    "step: less state": (working(step=lambda r: (r[0][:1], r[1])), "`step` of 'mine'.*form"),
    "final: no pair": (working(final=lambda r: r[0]), r"`final`.*pair \(upload, client state\)"),
    "final: shapes": (
        working(final=lambda r: (short(r[0]), r[1])),
        r"'mine'.*upload.*\['head.bias'\] is float32\[1\], not float32\[\d\]",
    ),
    "final: a leaf less": (
        working(final=lambda r: (fewer(r[0]), r[1])),
        r"'mine'.*upload.*\['head.bias'\] is missing",
    ),
    "client": (PLAIN._replace(client=lambda context: (1, 2, 3)), r"ClientUpdate\(init, step"),
    "roles": (PLAIN._replace(roles=(".*",)), "'roles' of 'fedavg'.*type tuple.*Roles"),
    "a role": (
        PLAIN._replace(roles=fp.contracts.Roles(shared=".*")),
        r"Roles.shared must be a tuple",
    ),
    "weights": (PLAIN._replace(weights="equal"), "no weighting 'equal'.*size, uniform"),
    "finish: update": (finishing(lambda r: r.update), r"'mine' must return .*Aggregated\(update"),
    "finish: shapes": (
        finishing(lambda r: r._replace(update=short(r.update))),
        "server state of 'fedavg'.*aggregator 'mine'.*head.bias",
    ),
    "finish: no state": (
        finishing(
            lambda r: fp.contracts.Aggregated(r.update, {}), init=lambda t: {"n": jnp.zeros(3)}
        ),
        r"'mine' must return a state.*\['n'\] is missing",
    ),
    "finish: metrics": (
        finishing(lambda r: r._replace(metrics={"n": jnp.ones(3)})),
        r"must be scalars, and 'n' is float32\[3\]",
    ),
    "update": (serving(fewer), r"server state of 'mine'.*\['head.bias'\] is missing"),
    "encoded: change": (sending(lambda u, *rest: u), r"'mine' must return .*Encoded\(update"),
    "encoded: shapes": (
        sending(lambda u, *rest: fp.contracts.Encoded(short(u))),
        r"'mine'.*head.bias",
    ),
    "encoded: memory": (
        sending(lambda u, *rest: fp.contracts.Encoded(u), memory=lambda u: u),
        r"'mine' must keep what Transform.memory begins with.*missing",
    ),
    "decoded": (
        sending(lambda u, *rest: fp.contracts.Encoded(u), server=lambda *arguments: None),
        r"server's part.*'mine'.*Decoded\(aggregate",
    ),
    "wire": (
        sending(lambda u, *rest: fp.contracts.Encoded(u), wire=lambda template, wires: 1),
        r"`wire` of 'mine'.*Wire\(entries, bits",
    ),
    "attack": (
        {
            "algorithm": PLAIN,
            "attack": fp.contracts.Attack("mine", lambda a, facts: a, lambda n: (0,)),
        },
        r"`apply` of 'mine'.*Wrapped\(algorithm, stages\)",
    ),
    "logits": ({"algorithm": PLAIN, "model": BARE}, r"forward pass.*Outputs\(logits"),
    "kinds": (
        {"algorithm": PLAIN, "model": fp.Model(forward, {}, {"a": jnp.ones(2)}, {}, None)},
        "Model.kinds must name.*'a'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_result_of_another_form_is_an_error_that_names_the_function(case):
    given, message = WRONG[case]
    options = given if isinstance(given, dict) else {"algorithm": given}
    options = {"model": toy.model(), "clients": toy.clients([4, 3]), **options}
    place = fp.Placement(engine="reference")
    refused(message, fp.simulate, **options, rounds=1, batch_size=4, placement=place)


def test_the_compiled_round_checks_them_too():
    given, message = WRONG["final: shapes"]
    refused(message, fp.simulate, toy.model(), given, toy.clients([4, 3]), rounds=1, batch_size=4)
