"""Arguments are checked by the types of signatures: every bound of every part, and a user's own."""

import inspect
import math
import typing
from collections.abc import Sequence
from typing import Annotated, Literal

import annotated_types
import jax
import numpy as np
import optax
import pytest
from annotated_types import Ge, Gt, Interval, Le, Len, Lt
from internals import fits, in_words, kinds_of, strict
from test_part import GIVEN, ROOMS

import fedjax_peft as fp

FACTORIES = {
    f"{room}.{name}": getattr(getattr(fp, room), name)
    for room in ROOMS
    for name in getattr(fp, room).__all__
}
WITHOUT_RANGE = {"learning_rate", "momentum", "weight_decay", "scaling"}
"""Numbers that can have either sign, or mean something for either."""


def leaves(kind, bounds=()):
    """Yields (type, bounds) of the alternatives of a type, and of the entries of lists."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        flat = [y for x in inner[1:] for y in (x if hasattr(x, "__iter__") else [x])]
        yield from leaves(inner[0], (*flat, *bounds))
    elif kind in (int, float, bool, str) or origin in (Literal, Sequence) or is_object(kind):
        yield kind, bounds
    else:
        for one in inner if origin is not None else ():
            yield from leaves(one, bounds)


def is_object(kind):
    return hasattr(kind, "_fields")


def outside(kind, bounds):
    """Yields values that a type does not allow, as close as possible to those that it allows."""

    def beside(x, towards):
        step = 1 if towards > 0 else -1
        return x + step if kind is int else float(np.nextafter(x, towards))

    for bound in bounds:
        match bound:
            case Gt(gt=x):
                yield x
            case Ge(ge=x):
                yield beside(x, -math.inf)
            case Lt(lt=x):
                yield x
            case Le(le=x):
                yield from () if math.isinf(x) else (beside(x, math.inf),)
            case annotated_types.MinLen(min_length=n):
                yield [1] * (n - 1)
    if kind in (int, float):
        yield from (math.nan, True, "one")
    if kind is int:
        yield 1.5
    if kind is bool:
        yield "yes"
    if typing.get_origin(kind) is Literal:
        yield from ("nothing like it", 3)
    if is_object(kind):
        yield from ("its name", fp.lora, 0.1)


def inside(kind, bounds):
    """Yields the bounds that belong to a type."""
    for bound in bounds:
        match bound:
            case Ge(ge=x) | Le(le=x):
                yield x if kind is int or math.isinf(x) else float(x)


def call(factory, name, value):
    parameters = inspect.signature(factory).parameters
    needed = {n for n, p in parameters.items() if p.default is p.empty} & GIVEN.keys()
    given = {n: GIVEN[n] for n in needed}
    factory(**given | ({"path": "absent.csv"} if "path" in parameters else {}) | {name: value})


def ranges(factory):
    """Yields (argument, the alternatives of its type)."""
    kinds = kinds_of(factory)
    for name in inspect.signature(factory).parameters:
        alternatives = [*leaves(kinds[name])]
        if not any(one is str for one, _ in alternatives):
            yield name, alternatives


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_every_bound_of_every_part_is_kept(factory):
    refused = []
    for name, alternatives in ranges(factory):
        for one, bounds in alternatives:
            for value in outside(one, bounds):
                wanted = rf"{name} = .* of {factory.__name__} must be "
                with pytest.raises(fp.InputError, match=wanted):
                    call(factory, name, value)
            for value in inside(one, bounds):
                try:
                    call(factory, name, value)
                except fp.InputError as error:
                    refused.append(str(error))
    # Two arguments together may be refused, or an absent file.
    assert not [text for text in refused if " must be a " in text]


def test_every_argument_of_every_part_has_a_type_and_every_number_a_range():
    for place, factory in FACTORIES.items():
        kinds = kinds_of(factory)
        assert hasattr(factory, "part"), place
        assert set(inspect.signature(factory).parameters) <= set(kinds), place
        for name in kinds.keys() - WITHOUT_RANGE:
            assert all(bounds for one, bounds in leaves(kinds[name]) if one in (int, float)), place


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: fp.algorithms.fedprox(optax.sgd(0.1), mu=-1),
            ["mu = -1 of fedprox must be a number from 0 up."],
        ),
        (
            lambda: fp.aggregators.fra(split="balnced"),
            ['must be "balanced" or "B" or "A".', "Did you mean 'balanced'?"],
        ),
        (lambda: fp.lora(rank_pattern={"query": 0}), ["rank_pattern = {'query': 0}", "table of"]),
        (lambda: fp.algorithms.fedavg("adamw"), ["optimizer = 'adamw'", "optax.adamw(...)"]),
        (lambda: fp.algorithms.fedavg(optax.sgd), ["must be an optax optimizer", "Call it: sgd("]),
        (lambda: fp.algorithms.fedavg(1e-3), ["must be an optax optimizer", "optax.adamw(1e-3)"]),
        (
            lambda: fp.algorithms.fedavg(optax.sgd(0.1), aggregator="fra"),
            ["aggregator = 'fra' of fedavg", "fp.aggregators.fra(...)"],
        ),
        (
            lambda: fp.algorithms.fedadam(optax.sgd(0.1), server_schedule=0.5),
            ["server_schedule = 0.5", "fp.schedules.cosine(rounds=100)"],
        ),
        (lambda: fp.transforms.chain(fp.transforms.int8(), "top_k"), ["transforms = 'top_k'"]),
        (lambda: fp.transforms.clip_norm(-math.inf), ["a number above 0"]),
        (lambda: fp.schedules.cosine(10**400), ["from 1 to 1,000,000"]),
        (lambda: fp.optimizers.sgd(0.1, nesterov=True), ["nesterov = True", "momentum = 0.9"]),
        (lambda: fp.optimizers.sgd(0.1, momentum=0, nesterov=True), ["needs a momentum above 0"]),
        (lambda: fp.privacy.gaussian_event(-1.0, 1), ["noise_multiplier = -1.0 of gaussian_event"]),
    ],
)
def test_a_refusal_names_the_argument_the_value_what_is_allowed_and_the_remedy(make, words):
    with pytest.raises(fp.InputError) as error:
        make()
    assert [word for word in words if word not in str(error.value)] == []


OWN = """
from __future__ import annotations
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal
from annotated_types import Gt, Interval, Len
import fedjax_peft as fp
if TYPE_CHECKING:
    from nowhere import Unknown

@fp.part
def own(
    inner: fp.contracts.Aggregator,
    share: Annotated[float, Interval(gt=0, le=1)] = None,
    how: Literal["one", "two"] = "one",
    several: Annotated[Sequence[int], Len(1, 2)] = (1,),
    other: Unknown = 3,
    anything=None,
    **more: Annotated[float | None, Gt(0)],
):
    return inner._replace(name=f"own {share}")
"""


def test_a_users_factory_is_checked_by_its_types():
    names = {"__name__": "own_parts"}
    exec(OWN, names)
    own, mean = names["own"], fp.aggregators.mean()
    own(mean)  # the default may be of another type than the annotation says
    own(mean, share=1, how="two", several=np.array([1, 2]), other="x", anything=object(), more=None)
    for wrong, words in (
        ({"share": 0.0}, "share = 0.0 of own must be a number above 0 and at most 1"),
        ({"how": "tow"}, "Did you mean 'two'"),
        ({"several": []}, "several"),
        ({"inner": 3}, "must be an aggregator"),
        ({"more": 0}, "more = 0 of own must be a number above 0"),
    ):
        with pytest.raises(fp.InputError, match=words):
            own(**{"inner": mean, **wrong})
    with pytest.raises(TypeError, match=r"own\(\).*'inner'"):
        own()


def test_run_time_values_are_not_checked_but_for_sizes():
    @jax.jit
    def trace(x):
        fp.algorithms.ditto(optax.sgd(x), lam=x)
        fp.aggregators.krum(x)  # a whole number that decides no size
        for make in (fp.transforms.top_k, fp.transforms.int8):
            with pytest.raises(fp.InputError, match="cannot be a run-time value"):
                make(x)
        return x

    trace(-1.0)


def test_types_in_words():
    for kind, words in {
        Annotated[int, Ge(1)] | None: "whole number from 1 up",
        Annotated[float, Ge(0), Lt(1)]: "number from 0 to below 1",
        Annotated[float, Gt(0), Lt(0.5)]: "number above 0 and below 0.5",
        Annotated[float, Le(2)]: "number at most 2",
        Sequence[Annotated[int, Interval(ge=0, le=255)]]: "list of whole numbers from 0 to 255",
        Annotated[Sequence[str], Len(1)]: "list of texts (at least 1)",
        Literal["a", "b"] | None: '"a" or "b"',
    }.items():
        assert in_words(kind) == words


def test_what_fits():
    assert fits(Annotated[float, Gt(0), Le(math.inf)], math.inf)
    assert not fits(float, math.inf)
    assert fits(int, np.int64(3))
    assert fits(Sequence[str], {"a", "b"})
    assert fits(Sequence[int], np.array([1, 2]))
    assert fits(Annotated[float, Ge(0)], np.float32(0))
    assert not fits(Annotated[Sequence[int], Len(1)], "text")


def test_whole_numbers_of_numpy_are_taken():
    config, made = {"model_type": "cnn", "image_size": 13, "channels": [2, 3]}, []
    for whole in (int, np.int64):
        head = fp.heads.classification(whole(4))
        made.append(fp.random_model(config, head=head, seed=whole(1)))
    assert len({(model.labels, repr(model.recipe)) for model in made}) == 1
    for name, x in made[0].trainable.items():
        np.testing.assert_array_equal(made[1].trainable[name], x, name)


def test_a_strict_function_is_checked_and_keeps_its_own_errors():
    @strict
    def double(number: Annotated[int, Ge(0)]) -> int:
        return 2 * number

    assert double(3) == 6
    with pytest.raises(fp.InputError, match="number = -1 of double must be a whole number from 0"):
        double(-1)
    with pytest.raises(TypeError, match=r"double\(\)"):
        double()
