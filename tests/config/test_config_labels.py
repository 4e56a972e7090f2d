"""The name of a result says what ran: methods that an override makes alike are refused."""

import pytest
from internals import config as configs
from internals import sweeps
from refusals import refused
from small_config import small

from fedjax_peft import InputError
from fedjax_peft.config import labels

RAW = small(
    methods={
        "prox": {"algorithm": {"name": "fedprox", "mu": 0.1}},
        "strong": {"algorithm": {"name": "fedprox", "mu": 0.5}},
        "fedlr": {"preset": "federa/fedlr"},
        "signs": {"preset": "federa/fedlr", "transforms": ["sign"]},
    },
    sweep={"baseline": "fedlr"},
)


def names(*overrides, only=(), raw=RAW):
    """Returns what the methods are called after overrides, as ``run`` does."""
    written = configs.only(configs.methods(raw, overrides), only)
    resolved = {name: configs.resolve(one) for name, one in written.items()}
    labels.check_apart(resolved, overrides)
    return [config["name"] for config in resolved.values()]


@pytest.mark.parametrize(
    ("overrides", "alike"),
    [
        (["methods.strong.algorithm.mu=0.1"], ["prox", "strong"]),
        (["algorithm=fedavg"], ["prox", "strong"]),
        (["preset=federa", "algorithm=", "transforms=[]"], ["prox", "strong", "fedlr", "signs"]),
        (["preset=", "transforms=[]"], ["fedlr", "signs"]),
        (["transforms=['int8']"], ["fedlr", "signs"]),
    ],
    ids=lambda x: x[0],
)
def test_overrides_that_make_methods_alike_are_refused(overrides, alike):
    who, first = ", ".join(map(repr, alike)), overrides[0][:4]
    refused(f"^{who} would be the same run .* after {first}", names, *overrides, only=alike)
    refused("would be the same run under", sweeps.plan, RAW, [*overrides, "seed=0,1"])


def test_methods_and_points_that_are_alike_without_an_override_are_refused():
    twins = small(methods={"one": {"rounds": 1}, "other": {}})
    refused(r"^'one', 'other' would be the same run .* apart\.", names, raw=twins)
    refused("'name=a', 'name=b' would be the same run", sweeps.plan, small(), ["name=a,b"])
    grids = {n: {"sweep": {"grid": {"rounds": [1, r]}}} for n, r in (("a", 2), ("b", 3))}
    refused("'a/rounds=1', 'b/rounds=1' would be the same run", sweeps.plan, small(methods=grids))


def test_methods_of_one_name_are_refused():
    refused(r"'prox', 'strong', .* would all be called 'x'", names, "name=x")
    with pytest.raises(InputError, match=r"'prox', 'strong', .* would all be called 'x'"):
        sweeps.plan(RAW, ["name=x", "seed=0,1"])
    assert names("name=x", only=["prox"]) == ["x"]


def test_a_method_that_an_override_replaces_has_another_name():
    assert names("rounds=3") == ["prox", "strong", "fedlr", "signs"]
    assert names("algorithm=ditto", only=["fedlr"]) == ["fedlr (algorithm=ditto)"]
    assert names("preset=", only=["signs"]) == ["signs (preset=)"]
    coded = names("transforms=['int8', 'ternary']", only=["signs"])
    assert coded == ["signs (transforms=int8+ternary)"]
    assert names("partition=iid", only=["fedlr"]) == ["fedlr"]  # of the study, not of a method
    assert names("methods.fedlr.peft=ia3", only=["fedlr"]) == ["fedlr (peft=ia3)"]
    own = names("methods.fedlr.preset=federa/deberta/fedlr", only=["fedlr"])
    assert own == ["fedlr"]  # its user says what this method is
    assert names("methods.fedlr.name=mine", only=["fedlr"]) == ["mine"]
    planned = sweeps.plan(RAW, ["peft=ia3", "seed=0,1"], ["fedlr", "prox"])
    assert planned.baseline == "fedlr (peft=ia3)"
    assert {point.config["name"] for point in planned.points} == {
        *("fedlr (peft=ia3)", "prox (peft=ia3)")
    }


def test_a_method_with_the_name_of_another_algorithm_is_noted():
    resolved = configs.resolve(small(algorithm={"name": "fedprox", "mu": 0.1}))
    assert [*labels.notices("mine", resolved)] == []
    assert [*labels.notices("fedprox", resolved)] == []
    (line,) = labels.notices("ditto", resolved)
    assert line == "the method 'ditto' has the name of an algorithm, and runs 'fedprox'"
