"""Every built-in transform with every kind of algorithm: it runs, or is refused with a reason."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from internals import Ledger, assign_roles, check_transforms, encoder
from options import run_options
from toy_transforms import compressors, example, upload

import fedjax_peft as fp
from fedjax_peft import aggregators, algorithms, session, transforms
from fedjax_peft.transforms import downlink

SGD = optax.sgd(0.1)
MODEL = toy.lora_model()
ALGORITHMS = {
    "fedavg": algorithms.fedavg(SGD),
    "fra": algorithms.fedavg(SGD, aggregator=aggregators.fra()),
    "median": algorithms.fedavg(SGD, aggregator=aggregators.median()),
    "ffa": algorithms.ffa(SGD),
    "rolora": algorithms.rolora(SGD),
    "fedsvd": algorithms.fedsvd(SGD),
    "lora_fair": algorithms.fedavg(SGD, aggregator=aggregators.lora_fair()),
    "lora_a2": algorithms.lora_a2(SGD, budget=1),
    "fedmomentum": algorithms.fedmomentum(SGD),
    "fedrot": algorithms.fedrot(SGD),
    "fedadam": algorithms.fedadam(SGD),
    "ditto": algorithms.ditto(SGD),
    "scaffold": algorithms.scaffold(SGD, learning_rate=0.1),
    "fednova": algorithms.fednova(SGD),
    "fedex": algorithms.fedex(SGD),
    "flora": algorithms.flora(SGD),
    "hetlora": algorithms.hetlora(SGD, prune=0.5),
    "local": algorithms.local(SGD),
}
REFUSED = {
    "flora": "every client starts from a random A of its own",
    "hetlora": "Leave prune out",
    ("fedex", "flasc"): "earlier rounds added to the frozen weights",
    ("fedmomentum", "flasc"): "earlier rounds added to the frozen weights",
    ("scaffold", "flasc"): "broadcast holds more than the shared leaves",
    ("fedsvd", "flasc"): "broadcast holds more than the shared leaves",
    ("fednova", "flasc"): r"compresses what the server broadcasts\..*more than the shared leaves",
}
"""Algorithm, or (algorithm, transform) -> the reason."""


def server_of(algorithm):
    names = assign_roles(MODEL.kinds, algorithm.roles)
    return algorithm.server.init(fp.tree.select(MODEL.trainable, names["shared"]))


def nonlinear(algorithm, transform):
    """Returns whether the transform changes a mean that the aggregator does not form."""
    return transform.changes_aggregate and not algorithm.aggregator.linear


@pytest.mark.parametrize("name", transforms.__all__)
@pytest.mark.parametrize("kind", ALGORITHMS)
@pytest.mark.sample("fedavg-*", "fra-*", "*-quantize", "*-flasc", "*-power_sgd")
def test_a_transform_encodes_uploads_or_is_refused_with_a_reason(kind, name):
    algorithm = ALGORITHMS[kind]
    reason = REFUSED.get(kind, REFUSED.get((kind, name)))
    if reason is None and nonlinear(algorithm, example(name)):
        reason = "does not form that mean"
    if reason is not None:
        with pytest.raises(fp.InputError, match=f"cannot be combined with .*{name}.*{reason}"):
            check_transforms(example(name), algorithm)
        return
    transform = check_transforms(example(name), algorithm)
    server = server_of(algorithm)
    template = algorithm.server.unchanged(server)
    rng = np.random.default_rng(0)
    learned = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(size=x.shape), x.dtype), template)
    part = algorithm.change_part(template)
    inputs = (transform.broadcast(transform.init(part)), {})
    encode = encoder(transform, algorithm, *inputs)
    encoded = encode(upload(learned, template, transform.memory(part)))
    sent = encoded.value
    assert jax.tree.structure(sent) == jax.tree.structure(learned)
    assert jax.tree.structure(encoded.memory) == jax.tree.structure(transform.memory(part))
    for a, b in zip(jax.tree.leaves(sent), jax.tree.leaves(learned), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.isfinite(a).all()
    if name in compressors():
        plain = Ledger(MODEL, algorithm, server, 4).up(0)
        small = Ledger(MODEL, algorithm, server, 4, transform=transform).up(0)
        assert small < plain or small == plain == 0


def test_error_feedback_over_factors_of_a_new_basis_is_warned_of():
    def begin(name, **options):
        given = [example("clip_norm"), example("top_k", **options)]
        session(MODEL, ALGORITHMS[name], toy.clients([7, 4]), transforms=given)

    with pytest.warns(UserWarning, match="Give error_feedback=False to 'clip_norm, top_k'"):
        begin("fra")
    begin("fra", error_feedback=False)  # a warning is an error in tests
    begin("fedavg")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fra", "rolora", "scaffold", "ditto"])
@pytest.mark.sample("fra")
def test_rounds_with_compressors_run_in_algorithms_of_all_kinds(kind):
    """One program: a chain of compressors, with the downlink where it is allowed."""
    feedback = {"error_feedback": False} if kind == "fra" else {}
    given = [example(name, **feedback) for name in ("top_directions", "top_k", "quantize")]
    if kind != "scaffold":
        given.insert(0, downlink(example("int8")))
    options = {"rounds": 3, "lanes": 2, "batch_size": 4, "eval_every": 9}
    federation = toy.clients([7, 4, 12])
    made = fp.simulate(
        toy.lora_model(), ALGORITHMS[kind], federation, transforms=given, **run_options(**options)
    )
    row = made.metrics[-1]
    assert row["dropped"] == []
    assert all(np.isfinite(x).all() for x in made.params.values())
    errors = [x for name, x in row.items() if name.startswith("compression_error")]
    assert len(errors) == 3
    assert all(0 < x < 1 for x in errors)
    assert ("downlink_error" in row) == (kind != "scaffold")
