"""The fingerprint of a run: another run is refused, by a resume and by a finished sweep alike."""

import dataclasses
import functools
import inspect
import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tomli_w
import toy
from flax import nnx
from internals import RECORDS
from options import run_options
from refusals import refused

import fedjax_peft as fp
from fedjax_peft import (
    TimeModel,
    aggregators,
    algorithms,
    asynchronous,
    attacks,
    availability,
    privacy,
    tasks,
    transforms,
)
from fedjax_peft.simulation.description import describe
from fedjax_peft.simulation.settings import check_recorded
from fedjax_peft.simulation.simulate import arguments
from fedjax_peft.simulation.storage.fingerprint import (
    MAY_CHANGE,
    changed_base,
    changed_leaf,
    differences,
    fingerprint,
    save,
    sums,
)

MODEL, FEDERATION, TEST = toy.model(), toy.clients((7, 4, 12, 1, 9)), toy.dataset(20, seed=3)
OTHER = toy.dataset(20, seed=4)


def prox(rate=0.1, mu=0.5, **options):
    return algorithms.fedprox(optax.sgd(rate), mu=mu, **options)


def dp(clip=1.0, noise=1.0):
    return privacy.central(clip=clip, noise_multiplier=noise)


def own(factor):
    """Returns an algorithm whose server captures a number."""
    plain = prox()
    update = plain.server.update

    def scaled(*arguments):
        return factor * update(*arguments)

    return plain._replace(server=plain.server._replace(update=scaled))


def changed(array, by=1):
    """Returns a copy of an array with another first entry."""
    copy = np.array(array)
    copy.flat[0] += by
    return copy


def federation(**changes):
    return dataclasses.replace(FEDERATION, **changes)


def other_data(**columns):
    """Returns the federation with some columns replaced."""
    data = FEDERATION.data
    return federation(data=dataclasses.replace(data, columns={**data.columns, **columns}))


def leaf(tree, name, value):
    """Returns the model with another leaf."""
    return MODEL.replace(**{tree: {**getattr(MODEL, tree), name: value}})


def moved(indices):
    """Returns client rows with the last row of client 0 at client 1."""
    first, second, *others = indices
    return (first[:-1], np.append(second, first[-1]), *others)


RUN = {
    "model": MODEL,
    "algorithm": prox(),
    "clients": FEDERATION,
    "test": TEST,
    "rounds": 2,
    "clients_per_round": 3,
    "batch_size": 4,
    "failure_rate": 0.1,
    "transforms": transforms.clip_norm(1.0),
}


def having(**options):
    """Returns the recorded run with other options."""
    return {**RUN, **options}


def was(text, run=RUN, **changes):
    """Returns the recorded run, the changed arguments, and a part of the refusal."""
    return run, changes, text


def decay(steps):
    return prox(rate=optax.linear_schedule(0.1, 0, steps))


FLIP = having(attack=attacks.sign_flip(0.2))
STALE = having(
    asynchronous=asynchronous.fedbuff(buffer_size=2), availability=availability.diurnal()
)
PRIVATE = having(transforms=None, privacy=dp())
X, A = FEDERATION.data.columns["x"], MODEL.trainable["layer.lora_a"]
REFUSED = [
    was("step_size: -0.1 -> -0.101", algorithm=prox(rate=0.101)),
    was("scale_by_adam", algorithm=algorithms.fedprox(optax.adam(0.1), mu=0.5)),
    was("transition_steps: 5.0 -> 9.0", having(algorithm=decay(5)), algorithm=decay(9)),
    was("algorithm.mu: 0.5 -> 0.1", algorithm=prox(mu=0.1)),
    was("'algorithms.fedprox' -> 'algorithms.fedavg'", algorithm=algorithms.fedavg(optax.sgd(0.1))),
    was("None -> 'aggregators.median'", algorithm=prox(aggregator=aggregators.median())),
    was(
        "values.mu: 0.5 -> 0.1",
        having(algorithm=lambda p: prox(mu=p["mu"]), values={"mu": 0.5}),
        values={"mu": 0.1},
    ),
    was("clients.weights: None", clients=federation(weights=np.arange(1.0, 6.0))),
    was("clients.indices", clients=federation(indices=moved(FEDERATION.indices))),
    was("columns.x", clients=other_data(x=changed(X))),
    was("test.columns", test=OTHER),
    was("test:", test=None),
    was(
        "client_test.indices",
        having(client_test=FEDERATION),
        client_test=toy.clients((7, 4, 12, 9, 1)),
    ),
    was(
        "model.frozen.layer.kernel:",
        model=leaf("frozen", "layer.kernel", 1.01 * MODEL.frozen["layer.kernel"]),
    ),
    was("model.trainable.layer.lora_a:", model=leaf("trainable", "layer.lora_a", A[::-1])),
    was("apply.dropout: 0.2 -> 0.1", model=toy.model(dropout=0.1)),
    was("client_ranks.0: None -> 1", client_ranks=[1, 2]),
    was(": 0.2 -> 0.4", FLIP, attack=attacks.sign_flip(0.4)),
    was("attack:", FLIP, attack=None),
    was(": 1.0 -> 2.0", transforms=transforms.clip_norm(2.0)),
    was("privacy.*: 1.0 -> 2.0", PRIVATE, privacy=dp(clip=2.0)),
    was("exponent: 0.5 -> 1.0", STALE, asynchronous=asynchronous.fedbuff(2, exponent=1.0)),
    was("availability.*share: .* -> 0.3", STALE, availability=availability.diurnal(share=0.3)),
    was("spread:", time_model=TimeModel(spread=1.0)),
    was("task", task=tasks.tagging()),
    was("server.update.factor: 0.1 -> 0.2", having(algorithm=own(0.1)), algorithm=own(0.2)),
    was("nonfinite: 'drop' -> 'raise'", nonfinite="raise"),
    was("batch_size: 4 -> 2", batch_size=2),
    was("clients_per_round: 3 -> 5", clients_per_round=None),
    was("deadline: None -> 9.0", deadline=9.0),
    was("client_state: 'device' -> 'host'", client_state="host"),
    was("rounds: 2 -> 1", rounds=1),
]
"""Examples of what :func:`test_every_argument_is_described_or_may_change` holds for all."""
ALLOWED = {
    **{"stop": lambda rows: None, "lanes": 1, "devices": 1, "length_buckets": 1, "rounds": 3},
    **{"examples": "host", "engine": "reference", "eval_every": 2, "eval_batch_size": 4},
    **{"diagnostics": ("clients",), "checkpoint_every": 1, "progress": True, "on_round": print},
}


def check(out, **options):
    """Compares a directory with a run of these options."""
    check_recorded(arguments(out=out, **run_options(**options)))


def recorded(directory, given):
    """Writes the records of a run that are compared, and returns the directory."""
    given = inspect.signature(fp.simulate).bind(**run_options(**given))
    given.apply_defaults()
    directory.mkdir()
    (directory / "config.toml").touch()
    save(directory, fingerprint(given.arguments))
    return directory


@pytest.mark.parametrize(("run", "changes", "text"), REFUSED)
def test_another_run_is_refused_with_the_first_difference(run, changes, text, tmp_path):
    out = recorded(tmp_path / "run", run)
    check(out, **run)
    refused(
        rf"was run with another config: .*{text}.*out= or --out", check, out, **{**run, **changes}
    )


def test_a_value_that_is_no_number_equals_itself_alone():
    nan, other = {"x": float("nan")}, {"x": 1.0}
    assert differences(nan, dict(nan)) == []
    assert differences(nan, other) == differences(other, nan) == ["x"]


def test_what_changes_no_result_may_change(tmp_path):
    out = recorded(tmp_path / "run", RUN)
    for name, value in ALLOWED.items():
        check(out, **{**RUN, name: value})


def test_lists_of_a_config_are_compared_and_other_versions_are_named(tmp_path):
    config = {"peft": {"targets": ["query", "key", "value", "dense"]}, "rate": 1, "scale": 1.0}
    out = recorded(tmp_path / "run", RUN)
    (out / "config.toml").write_text(tomli_w.dumps(config))
    check(out, **RUN, config={**config, "rate": 1.0, "scale": 1})
    stored = json.loads((out / "fingerprint.json").read_text())
    stored["versions"]["jax"] = "0.1"
    (out / "fingerprint.json").write_text(json.dumps(stored))
    config = {**config, "peft": {"targets": ["query", "key", "value"]}}
    with pytest.raises(fp.InputError, match=r"peft\.targets: .*'dense'.* Of jax, the run has 0\.1"):
        check(out, **RUN, config=config)


def test_code_is_compared_within_one_version_of_python(tmp_path):
    run = {**RUN, "algorithm": prox()._replace(round_metrics=lambda index: {"a": index})}
    other = {**RUN, "algorithm": prox()._replace(round_metrics=lambda index: {"b": index})}
    out = recorded(tmp_path / "run", run)
    refused(r"round_metrics\.__code__: ", check, out, **other)
    stored = json.loads((out / "fingerprint.json").read_text())
    stored["versions"]["python"] = "3.10"
    (out / "fingerprint.json").write_text(json.dumps(stored))
    check(out, **other)


def test_another_form_of_the_file_is_not_compared(tmp_path):
    out = recorded(tmp_path / "run", RUN)
    stored = json.loads((out / "fingerprint.json").read_text())
    (out / "fingerprint.json").write_text(json.dumps(stored | {"format": 1}))
    refused("by another version.*reported and exported, but not continued", check, out, **RUN)


def options_of_simulate():
    """Returns all options of ``simulate``, those of a record as ``record.name``."""
    for name in inspect.signature(fp.simulate).parameters:
        fields = dataclasses.fields(RECORDS[name]) if name in RECORDS else ()
        yield from [f"{name}.{field.name}" for field in fields] or [name]


def test_the_list_of_what_may_change_is_that_of_simulate_and_of_the_documentation():
    names = {name for names in MAY_CHANGE.values() for name in names}
    assert names - {"stop", "trackers", "records"} <= set(options_of_simulate())
    page = (Path(__file__).parents[2] / "docs" / "howto" / "resume.md").read_text()
    assert not {name for name in names if f"`{name}`" not in page}


def test_every_argument_is_described_or_may_change():
    given = inspect.signature(fp.simulate).bind(**run_options(**RUN))
    given.apply_defaults()
    found = fingerprint(given.arguments)
    apart = {"out", "resume", "evaluation.stop"}
    apart |= {name for name in options_of_simulate() if name.startswith("records.")}
    free = {name for names in MAY_CHANGE.values() for name in names}
    for name in set(options_of_simulate()) - apart - free:
        assert any(x == name or x.startswith(f"{name}.") for x in found), name


GIVEN = {
    **{"optimizer": optax.sgd(0.1), "server": optax.adam(0.1), "learning_rate": 0.1},
    **{"clip": 1.0, "noise_multiplier": 1.0, "buffer_size": 2, "at": 1, "clients": 5, "rounds": 5},
    **{"root_rounds": 1, "cluster_rounds": 1, "sparse_rounds": 1, "hostile": 1, "target": 1},
    **{"lipschitz": 10.0},
    **{"patch": 2, "std": 0.5, "factor": 2.0, "period": 5.0, "bits": 8, "share": 0.3, "rank": 2},
}
"""Values of the arguments that a function of the library requires."""


def made():
    """Yields (name, function, arguments) of the library's algorithms, transforms and so on."""
    modules = (algorithms, aggregators, transforms, attacks, privacy, asynchronous, availability)
    for module in modules:
        for name in module.__all__:
            function = getattr(module, name)
            if not inspect.isfunction(function):
                continue
            parameters = inspect.signature(function).parameters.values()
            needed = [p.name for p in parameters if p.default is p.empty or p.name == "patch"]
            if set(needed) <= GIVEN.keys():
                yield f"{module.__name__}.{name}", function, {n: GIVEN[n] for n in needed}


@pytest.mark.filterwarnings("ignore:The noise of the FRA-LoRA paper")
def test_every_number_of_every_part_is_described():
    """A number that a function of the library takes must be a part of the description."""
    tried, missing = 0, []
    for name, function, given in made():
        before = describe(function(**given))
        for parameter in inspect.signature(function).parameters.values():
            value = given.get(parameter.name, parameter.default)
            if value is not None and not isinstance(value, int | float):
                continue
            others = [not value] if isinstance(value, bool) else [0.5, 0.3, 1.5, 2, 3, True]
            for other in (x for x in others if x != value):
                try:
                    after = function(**{**given, parameter.name: other})
                except (fp.InputError, TypeError, ValueError):
                    continue  # not a valid value
                tried += 1
                missing += [] if describe(after) != before else [f"{name}({parameter.name}=...)"]
                break
    assert tried > 150
    assert not missing


SCALE = 1.0


def scaled(x):
    return SCALE * x


class Own:
    """A callable of the user."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return scaled(self.factor * x)


def recursive(n):
    return recursive(n - 1) if n else 0


def measure(moment):
    return {"scaled": [(lambda x: SCALE * x)(row) for row in moment.rows]}


def test_functions_of_the_user_are_described_with_their_code_and_globals(monkeypatch):
    before = describe([scaled, Own(1.0), jax.jit(scaled), recursive])
    assert describe([scaled, Own(1.0), jax.jit(scaled), recursive]) == before
    assert describe(Own(2.0)) != describe(Own(1.0))
    assert describe(lambda x: x + 1) != describe(lambda x: x + 2)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    after = describe([scaled, Own(1.0), jax.jit(scaled), recursive])
    assert [after[i] == before[i] for i in range(4)] == [False, False, False, True]
    assert describe(measure)["SCALE"] == 2.0
    known = describe(measure)
    monkeypatch.setitem(globals(), "rows", 3)  # the name of an attribute
    assert describe(measure) == known


def test_code_of_the_user_is_the_same_in_a_file_of_another_name():
    text = "SCALE = {}\nclass Own:\n    def act(self): return SCALE\ndef act(x): return Own, x\n"
    found = []
    for name, scale in (("one", 1.0), ("two", 1.0), ("three", 2.0)):
        module = types.ModuleType(name)
        exec(compile(text.format(scale), f"/{name}.py", "exec"), module.__dict__)
        found.append(describe(module.act))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0, None),
        ("1", 1),
        ((), None),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (np.arange(3), np.arange(3.0)),
        (np.arange(99), changed(np.arange(99))),
        (jnp.arange(99), jnp.arange(99)[::-1]),
        (list(range(99)), [*range(98), 0]),
        (range(3), range(4)),
        (slice(1, 2), slice(1, 3)),
        (np.array(["a", None], object), np.array(["b", None], object)),
        (jax.random.key(0), jax.random.key(1)),
        (nnx.RngKey(jax.random.key(0)), nnx.RngKey(jax.random.key(1))),
        (nnx.Param(jnp.zeros(3)), nnx.Param(jnp.ones(3))),
        (jnp.float32, jnp.bfloat16),
        (np.float64(0.1), np.float64(0.2)),
        (jnp.add, jnp.maximum),
        (np.add, np.maximum),
        (b"a", b"b"),
        ("x" * 999, "x" * 998 + "y"),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (optax.adamw(1e-3), optax.adamw(1e-3, b1=0.8)),
        (optax.sgd(0.1), optax.sgd(0.1, momentum=0.0)),
        (optax.linear_schedule(1, 0, 5), optax.linear_schedule(1, 0, 6)),
    ],
)
def test_different_values_have_different_descriptions(one, other):
    assert json.dumps(describe(one)) != json.dumps(describe(other))


def test_what_is_not_plain_is_a_name_a_shape_or_a_digest():
    assert describe(jax.ShapeDtypeStruct((2, 3), jnp.float32)) == "float32[2, 3]"
    assert describe(jax.jit(jnp.tanh)) == "tanh"
    assert describe(float("nan")) == "nan"
    assert describe(optax) == "optax"
    assert describe(logging.getLogger("optax")) == "logging.Logger"
    loop: list = [1]
    loop.append(loop)
    assert describe(loop) == [1, "itself"]


MADE = """
import json, optax, fedjax_peft as fp
from fedjax_peft.simulation.description import describe
optimizer = optax.adamw(optax.cosine_decay_schedule(1e-3, 100), b1=0.8)
parts = [fp.algorithms.fedprox(optimizer, mu=0.1), fp.privacy.central(0.5, 1.0), {"b", "a"}]
parts += [fp.transforms.top_k(0.1), fp.attacks.sign_flip(0.2)]
parts += [fp.partition.dirichlet(fp.testing.tiny_dataset(50), 5, alpha=1.0)]
made = json.dumps(describe(parts), sort_keys=True)
"""


@pytest.mark.slow
def test_descriptions_are_the_same_in_another_process():
    own = {**os.environ, "PYTHONHASHSEED": "1"}
    run = [sys.executable, "-c", f"{MADE}\nprint(made)"]
    told = subprocess.run(run, env=own, capture_output=True, check=True, text=True).stdout
    here: dict = {}
    exec(MADE, here)
    assert told.strip() == here["made"]
    assert len(told) > 1000
    assert "0x" not in told, "no addresses"


def test_leaves_that_differ_by_rounding_only_are_equal():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 400)).astype(np.float32)
    noise = rng.normal(size=x.shape).astype(np.float32)
    before = sums(x)
    assert not changed_leaf(before, sums(x * (1 + 1e-6 * noise)))
    assert not changed_leaf(sums(np.zeros(3)), sums(np.zeros(3)))
    for other in (x + 0.01 * noise, -x, x[::-1], x * 1.01, x.T, x.astype(jnp.bfloat16), x * np.nan):
        assert changed_leaf(before, sums(other))
    assert not changed_leaf(sums(x * np.nan), sums(x * np.nan))


def test_base_weights_are_compared_by_name_and_sums(tmp_path):
    x = np.random.default_rng(0).normal(size=(9, 9)).astype(np.float32)
    assert changed_base(tmp_path, {"a": x}) is None  # a run that recorded none
    save(tmp_path, {"model.frozen.a": sums(x), "model.trainable.b": sums(x)})
    assert changed_base(tmp_path, {"a": x}) is None
    assert changed_base(tmp_path, {"a": 1.01 * x}) == "a"
    assert changed_base(tmp_path, {"b": x}) == "a"
