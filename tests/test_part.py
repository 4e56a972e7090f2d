"""A part knows its call: every factory of the library, written to JSON, read, and made again."""

import inspect
import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from compiled import compilations
from internals import Call
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.simulation.description import describe

ROOMS = (
    *("aggregators", "algorithms", "asynchronous", "attacks", "availability", "optimizers"),
    *("peft", "privacy", "schedules", "tasks", "transforms"),
)
ADAM = fp.optimizers.adamw(1e-3)
GIVEN = {
    **{"optimizer": ADAM, "server": ADAM, "learning_rate": 0.1, "clip": 1.0, "std": 0.5},
    **{"noise_multiplier": 1.0, "buffer_size": 2, "at": 1, "clients": 5, "rounds": 5, "size": 4},
    **{"root_rounds": 1, "cluster_rounds": 1, "sparse_rounds": 1, "hostile": 1, "target": 1},
    **{"lipschitz": 10.0},
    **{"factor": 2.0, "period": 5.0, "bits": 8, "share": 0.3, "rank": 2, "delta": 1e-5},
    **{
        "trusted": 0,
        "max_norm": 1.0,
        "on": 3.0,
        "off": 2.0,
        "ranks": (2, 4),
        "patch": 2,
        "decay": 0.9,
    },
}
"""Arguments without a default, for every factory that has them."""
FILES = ("availability.trace", "peft.pretrained")
"""Factories that read a file, which these tests do not have."""


def factories():
    for room in ROOMS:
        module = getattr(fp, room)
        for name in module.__all__:
            if (one := getattr(module, name)) and f"{room}.{name}" not in FILES:
                yield pytest.param(one, id=f"{room}.{name}")


def made(factory):
    parameters = inspect.signature(factory).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind <= p.KEYWORD_ONLY]
    given = {n: GIVEN[n] for n in needed if n in GIVEN}
    if factory.__name__ == "backdoor":
        given["patch"] = 2
    return factory(**given)


@pytest.mark.filterwarnings("ignore:The noise of the FRA-LoRA paper")
@pytest.mark.parametrize("factory", [*factories()])
def test_every_part_is_made_again_from_json(factory):
    one = made(factory)
    call = fp.call_of(one)
    read = Call.read(json.loads(json.dumps(call.table())))
    assert read == call
    assert hash(read) == hash(call)
    again = read.build()
    assert fp.call_of(again) == call
    assert describe(again) == describe(one)
    code = eval(repr(call), {"fp": fp})
    assert fp.call_of(code) == call


def test_flat_names_show_what_differs():
    one = fp.algorithms.fedprox(ADAM, mu=0.1)
    other = fp.algorithms.fedprox(fp.optimizers.adamw(2e-3), mu=0.2)
    before, now = (fp.call_of(x).flat("algorithm") for x in (one, other))
    assert {name: (before[name], now[name]) for name in before if before[name] != now[name]} == {
        "algorithm.optimizer.learning_rate": (1e-3, 2e-3),
        "algorithm.mu": (0.1, 0.2),
    }
    assert before["algorithm"] == "algorithms.fedprox"


def test_a_changed_part_has_no_call():
    algorithm = fp.algorithms.fedprox(ADAM)
    changed = algorithm._replace(name="mine")
    assert fp.call_of(changed) is None
    assert fp.call_of(algorithm) is not None
    assert changed.name == "mine"
    assert isinstance(changed, fp.contracts.Algorithm)
    for other in (None, 1, ADAM._replace(init=None), optax.sgd(0.1)):
        assert fp.call_of(other) is None


def test_values_replace_recorded_ones_and_can_be_traced():
    call = fp.call_of(fp.algorithms.fedopt(ADAM, server=fp.optimizers.sgd(1.0)))
    again = call.build({"optimizer.learning_rate": 0.5, "server": fp.optimizers.adam(0.2)})
    assert fp.call_of(again).flat()["optimizer.learning_rate"] == 0.5
    assert fp.call_of(again).flat()["server"] == "optimizers.adam"

    @jax.jit
    def step(rate):
        made = fp.call_of(fp.optimizers.sgd(1.0)).build({"learning_rate": rate})
        assert fp.call_of(made) is None  # a traced value has no number
        return made.update(jnp.ones(2), made.init(jnp.ones(2)))[0]

    assert step(0.1).tolist() == [-np.float32(0.1)] * 2
    assert step(0.2).tolist() == [-np.float32(0.2)] * 2
    assert step._cache_size() == 1


def test_what_a_file_cannot_hold_is_named_and_asked_for():
    call = fp.call_of(fp.algorithms.fedavg(optax.sgd(0.1), head="private"))
    assert list(call.unknown()) == ["optimizer"]
    read = Call.read(json.loads(json.dumps(call.table())))
    refused(r"algorithm\.optimizer is not recorded", read.build, at="algorithm")
    again = read.build({"optimizer": ADAM})
    assert fp.call_of(again) == fp.call_of(fp.algorithms.fedavg(ADAM, head="private"))


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"name": "algorithms.fedproxx"}, "'fedprox'"),
        ({"name": "algorithm.fedprox"}, "'algorithms'"),
        ({"name": "aggregators.mean", "eror": False}, "no argument 'eror'"),
        ({"name": "aggregators.by_svd"}, "no part fp.aggregators"),
        ({"name": "os:system", "command": "false"}, "os:system"),
        ({"name": "no_such_module:halved"}, "no_such_module"),
        ({"name": "__main__:no_such_function"}, "put them into a module"),
    ],
)
def test_a_call_that_cannot_be_made_is_refused_by_name(table, named):
    with pytest.raises(fp.InputError) as error:
        Call.read(table).build(at="algorithm")
    assert named in str(error.value)


OWN = """
import fedjax_peft as fp

@fp.part
def halved(inner, share=0.5):
    return inner._replace(name=f"halved {share}")
"""


def test_a_users_factory_is_a_part(tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import my_parts

    try:
        one = my_parts.halved(fp.aggregators.mean(error=False), share=0.25)
        call = fp.call_of(one)
        assert call.name == "my_parts:halved"
        assert repr(call) == "halved(fp.aggregators.mean(error=False), share=0.25)"
        table = json.loads(json.dumps(call.table()))
    finally:
        del sys.modules["my_parts"]
    again = Call.read(table).build({"inner.error": True})  # the module is loaded from its file
    assert again.name == "halved 0.25"
    assert fp.call_of(again).flat()["inner.error"] is True


def test_a_function_of_a_script_is_found_while_it_runs(monkeypatch):
    main = types.ModuleType("__main__")
    exec(OWN, vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    call = fp.call_of(main.halved(fp.aggregators.mean()))
    assert call.build().name == "halved 0.5"


def test_a_scheduled_optimizer_is_made_again():
    one = fp.schedules.scheduled(fp.optimizers.adam(0.1), fp.schedules.cosine(rounds=5))
    algorithm = fp.algorithms.fedavg(one)
    again = Call.read(fp.call_of(algorithm).table()).build()
    assert fp.call_of(again).flat()["optimizer.schedule.rounds"] == 5
    assert describe(again) == describe(algorithm)


def test_a_part_of_another_factory_is_not_renamed():
    inner = fp.aggregators.mean()

    @fp.part
    def outer(number):
        return inner

    one = outer(3)
    assert "outer" in fp.call_of(one).name
    assert fp.call_of(inner).name == "aggregators.mean"


def test_transforms_in_a_chain_are_parts_of_its_call():
    one = fp.transforms.chain(
        fp.transforms.clip_norm(1.0),
        fp.transforms.error_feedback(fp.transforms.top_k(0.1)),
        fp.transforms.downlink(fp.transforms.int8()),
    )
    call = fp.call_of(one)
    assert call.flat()["transforms.1.transform.share"] == 0.1
    assert describe(Call.read(json.loads(json.dumps(call.table()))).build()) == describe(one)
    assert fp.call_of(eval(repr(call), {"fp": fp})) == call
    changed = call.build({"transforms.1.transform.share": 0.2})
    assert fp.call_of(changed).flat()["transforms.1.transform.share"] == 0.2


def test_parts_of_equal_calls_are_equal():
    def make(mu=0.1, aggregator=None):
        return fp.algorithms.fedprox(fp.optimizers.adamw(1e-3), mu=mu, aggregator=aggregator)

    assert make() == make()
    assert hash(make()) == hash(make())
    assert make(aggregator=fp.aggregators.fra()) == make(aggregator=fp.aggregators.fra())
    for other in (
        make(0.2),
        make(1),
        make()._replace(name="mine"),
        make(aggregator=fp.aggregators.mean()),
    ):
        assert other != make()
    assert make(1) != make(1.0)  # their programs may differ in a type
    raw = optax.sgd(0.1)
    assert fp.algorithms.fedavg(raw) == fp.algorithms.fedavg(raw)
    assert fp.algorithms.fedavg(raw) != fp.algorithms.fedavg(optax.sgd(0.1))


def test_a_users_function_that_was_defined_anew_makes_another_part():
    made = []
    for share in (0.1, 0.9):

        @fp.part
        def mine():
            return fp.aggregators.mean()._replace(name=f"mine {share}")  # noqa: B023

        made.append(mine())
    one, other = made
    assert fp.call_of(one) == fp.call_of(other)
    assert one != other
    assert fp.algorithms.fedavg(ADAM, aggregator=one) != fp.algorithms.fedavg(
        ADAM, aggregator=other
    )


def test_an_equal_algorithm_compiles_nothing():
    model, clients = toy.model(), toy.clients((4, 5, 6))

    def run(mu):
        algorithm = fp.algorithms.fedprox(fp.optimizers.sgd(0.1), mu=mu)
        return fp.simulate(
            model,
            algorithm,
            clients,
            rounds=2,
            clients_per_round=2,
            records=fp.Records(progress=False),
        )

    first = run(0.1)
    compilations.clear()
    again = run(0.1)
    assert not compilations
    jax.tree.map(np.testing.assert_array_equal, again.params, first.params)
    run(0.2)
    assert compilations


def test_python_ends_quietly_with_parts(tmp_path):
    code = (
        "import fedjax_peft as fp\n"
        "algorithm = fp.algorithms.fedprox(fp.optimizers.sgd(0.1))\n"
        "class Forgets:\n"
        "    def __del__(self):\n"
        "        hash(algorithm)\n"
        "kept = fp.contracts.kept = Forgets()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_constants_inside_a_chain_are_named():
    chain = fp.transforms.chain(fp.transforms.clip_norm(1.0), fp.transforms.top_k(0.1))
    assert [*fp.call_of(chain).constants("transforms")] == ["transforms.transforms.1.share"]
