"""The points of a sweep, from ``[sweep]`` and the command line."""

import weakref

import pytest
from internals import Parts, running, sweeps
from internals import config as configs
from refusals import refusals, refused
from small_config import small

import fedjax_peft as fp

RAW = {
    "rounds": 2,
    "model": {"name": "minilm-l6"},
    "data": {"name": "20newsgroups"},
    "partition": {"name": "dirichlet", "clients": 4, "alpha": 1.0},
    "optimizer": {"learning_rate": 1e-3},
}
METHODS = {
    "fedlr": {"peft": "lora"},
    "fedprox": {"peft": "lora", "algorithm": {"name": "fedprox", "mu": 0.1}},
}


def raw(sweep=None, **changes):
    table = {} if sweep is None else {"sweep": sweep}
    return {**RAW, **table, **changes}


def folders(planned):
    return [point.folder for point in planned.points]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed=0..3", ("seed", [0, 1, 2, 3])),
        ("seed=2..2", ("seed", [2])),
        ("optimizer.learning_rate=1e-3,3e-3", ("optimizer.learning_rate", [0.001, 0.003])),
        ("algorithm=fedavg,ditto", ("algorithm", ["fedavg", "ditto"])),
        ("system.client_ranks=[1,2],[4,8]", ("system.client_ranks", [[1, 2], [4, 8]])),
        ('name="a,b",c', ("name", ["a,b", "c"])),
        ("system.client_ranks=[1,2]", None),
        ("rounds=20", None),
        ("peft=", None),
    ],
)
def test_an_override_can_have_several_values(text, expected):
    assert sweeps.axis(text) == expected


@pytest.mark.parametrize("text", ["seed=4..0", "seed=0..999999"])
def test_a_range_goes_up_and_is_not_too_long(text):
    refused("must go up", sweeps.axis, text)


def test_every_combination_is_a_point_and_seeds_change_least_often():
    planned = sweeps.plan(raw(), ["seed=0..1", "optimizer.learning_rate=1e-3,3e-3"])
    assert folders(planned) == [
        "seed=0,learning_rate=0.001",
        "seed=0,learning_rate=0.003",
        "seed=1,learning_rate=0.001",
        "seed=1,learning_rate=0.003",
    ]
    assert planned.keys == ["seed", "optimizer.learning_rate"]
    last = planned.points[-1].config
    assert (last["seed"], last["optimizer"]["learning_rate"]) == (1, 0.003)
    assert last["runtime"] == ["optimizer.learning_rate"]
    assert last == {**configs.resolve({**last, "preset_changes": None}), "preset_changes": None}


def test_the_table_of_a_config_gives_the_grid_and_methods_can_have_their_own():
    table = {
        "choose_by": "validation_accuracy",
        "baseline": "fedlr",
        "grid": {"seed": [0, 1], "optimizer": {"learning_rate": [1e-3, 1e-2]}},
    }
    own = {**METHODS["fedprox"], "sweep": {"grid": {"optimizer.learning_rate": [1e-4]}}}
    written = raw(table, methods={**METHODS, "fedprox": own})
    planned = sweeps.plan(written)
    assert (planned.choose_by, planned.baseline) == ("validation_accuracy", "fedlr")
    assert len([f for f in folders(planned) if f.startswith("fedlr/")]) == 4
    assert [f for f in folders(planned) if f.startswith("fedprox/")] == [
        "fedprox/seed=0,learning_rate=0.0001",
        "fedprox/seed=1,learning_rate=0.0001",
    ]
    # The command line replaces a key of the grid, or fixes it.
    assert len(sweeps.plan(written, ["seed=0..4"], only=["fedlr"]).points) == 10
    fixed = sweeps.plan(written, ["seed=7"])
    assert {point.config["seed"] for point in fixed.points} == {7}
    assert len(fixed.points) == 3
    mine = sweeps.plan(written, ["methods.fedprox.algorithm.mu=0.1,1.0"])
    assert {p.name for p in mine.points if p.method == "fedprox"} >= {
        "seed=0,learning_rate=0.0001,mu=1.0"
    }
    assert not any("mu" in p.name for p in mine.points if p.method == "fedlr")
    # ``run`` ignores the table.
    assert "sweep" not in configs.resolve(configs.methods(written)["fedlr"])


def test_what_one_method_is_given_counts_beside_what_all_are_given():
    texts = ["methods.fedlr.peft.rank=2", "peft.rank=4,8", "methods.fedprox.rounds=3,5", "rounds=7"]
    for given in (texts, texts[::-1]):
        points = sweeps.plan(raw(methods=METHODS), given).points
        found = [(x.method, x.config["peft"]["rank"], x.config["rounds"]) for x in points]
        expected = [("fedprox", rank, rounds) for rank in (4, 8) for rounds in (3, 5)]
        assert sorted(found) == [("fedlr", 2, 7), *expected]


def test_numbers_other_than_0_are_run_time_values():
    planned = sweeps.plan(
        raw(methods={"fedprox": METHODS["fedprox"]}),
        ["algorithm.mu=0.0,0.5", "optimizer.learning_rate=1e-3,3e-3", "peft.rank=4,8", "seed=0..1"],
    )
    found = {tuple(point.config["runtime"]) for point in planned.points}
    assert found == {
        ("optimizer.learning_rate",),
        ("algorithm.mu", "optimizer.learning_rate"),
    }
    table = {"constants": ["algorithm.mu"], "grid": {"algorithm.mu": [0.1, 0.5]}}
    constant = sweeps.plan(raw(table, algorithm="fedprox"))
    assert {point.config["runtime"] for point in constant.points} == {None}


def test_equal_settings_make_equal_functions_of_the_values():
    def made(point):
        return running.made_from_values(point.config)

    points = sweeps.plan(raw(), ["seed=0..1", "optimizer.learning_rate=1e-3,3e-3"]).points
    functions = [made(point) for point in points]
    assert len({f["algorithm"] for f in functions}) == 1
    assert [f["values"]["optimizer.learning_rate"] for f in functions] == [1e-3, 3e-3] * 2
    decayed = {**RAW, "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1}}
    changed = sweeps.plan(decayed, ["optimizer.learning_rate=1e-3,3e-3"]).points[0]
    assert made(changed)["algorithm"] not in {f["algorithm"] for f in functions}
    algorithm = functions[0]["algorithm"](functions[0]["values"])
    assert algorithm.name == "fedavg"


def test_transforms_of_a_sweep_keep_their_order():
    """They are applied in it, so two methods with opposite orders are not the same run."""
    links = {"top_k": {"share": 0.1}, "int8": {}}
    orders = {"sparse": [*links], "coded": [*links][::-1]}
    methods = {n: {"transforms": {one: links[one] for one in x}} for n, x in orders.items()}
    keys = ["optimizer.learning_rate=1e-3,3e-3", "transforms.top_k.share=0.1,0.2"]
    for point in sweeps.plan(raw(methods=methods), keys).points:
        made = running.made_from_values(point.config)
        names = [fp.call_of(one).name for one in made["transforms"](made["values"])]
        assert names == [f"transforms.{name}" for name in orders[point.method]]


@pytest.mark.parametrize("schedule", [{}, {"schedule": {"name": "cosine"}}])
def test_an_algorithm_of_swept_rates_reads_the_schedule(schedule):
    rates = {**RAW, "rounds": 7, "runtime": ["optimizer.learning_rate"], **schedule}
    made = running.made_from_values(configs.resolve(rates))
    assert made["values"] == {"optimizer.learning_rate": 1e-3}
    assert made["algorithm"](made["values"]).name == "fedavg"
    again = running.made_from_values(configs.resolve({**rates, "rounds": 9}))
    assert (again["algorithm"] == made["algorithm"]) == (not schedule), "a schedule has the rounds"


@pytest.mark.parametrize("own", [{}, {"seed": 3}])
def test_attacks_with_a_seed_of_their_own_are_equal_functions_for_every_seed(own):
    attack = {"name": "sign_flip", "share": 0.2, **own}
    points = sweeps.plan(
        raw(attack=attack), ["seed=0..1", "optimizer.learning_rate=1e-3,3e-3"]
    ).points
    made = [running.made_from_values(point.config) for point in points]
    assert len({one["attack"] for one in made}) == (1 if own else 2)
    hostile = {one["attack"](one["values"]).hostile(20) for one in made}
    assert len(hostile) == (1 if own else 2)


test_bad_sweeps_are_refused_before_anything_runs = refusals(
    lambda sweep, overrides: sweeps.plan(raw(sweep), overrides),
    (None, [], "Nothing is swept"),
    ({"grid": {"seed": 3}}, [], r"\[sweep.grid\] seed = 3 must be a list"),
    ({"grid": {"seed": []}}, [], "must be a list of values"),
    ({"gird": {}}, ["seed=0..1"], "Unknown config key .* 'gird'.*'grid'"),
    ({"choose_by": 3}, ["seed=0..1"], "must be the name of a metric"),
    ({"baseline": "fedav"}, ["seed=0..1"], "'fedav' is not a method"),
    (None, ["optimizer.learning_rat=1e-3,3e-3"], "Unknown config key .*learning_rat"),
    (None, ["optimizer.learning_rate=1e-3,x"], "cannot be 'x'"),
    ("yes", ["seed=0..1"], r"\[sweep\] must be a table"),
)


def test_an_unknown_method_is_named():
    refused(r"no \[methods.fedl\]", sweeps.plan, raw(methods=METHODS), ["seed=0..1"], only=["fedl"])
    for text in ("methods.fedpox.seed=0..1", "methods.fedpox.rounds=3"):
        with pytest.raises(fp.InputError, match=r"not have\. Did you mean 'fedprox'\?"):
            sweeps.plan(raw(methods=METHODS), ["seed=0..1", text])


def test_a_table_can_be_swept():
    tables = [{"name": "iid", "clients": 2}, {"name": "dirichlet", "clients": 3, "alpha": 0.1}]
    text = 'partition={name="iid",clients=2},{name="dirichlet",clients=3,alpha=0.1}'
    for planned in (
        sweeps.plan(raw(), [text]),
        sweeps.plan(raw({"grid": {"partition": tables}})),
    ):
        found = [point.config["partition"] for point in planned.points]
        assert [(one["name"], one["clients"]) for one in found] == [("iid", 2), ("dirichlet", 3)]


def test_a_method_s_name_may_have_dots():
    planned = sweeps.plan(
        raw(methods={"lr0": {}, "lr0.1": {"rounds": 9}}), ["methods.lr0.1.seed=0..1"]
    )
    assert folders(planned)[1:] == ["lr0.1/seed=0", "lr0.1/seed=1"]
    assert planned.keys == ["seed"]


def test_runs_with_the_same_data_read_them_once(monkeypatch):
    """Seeds share the data if ``data.seed`` is given, and the partition still differs."""
    calls = []
    monkeypatch.setattr(running, "load_data", lambda config: calls.append(config["seed"]) or {})
    parts = Parts()
    for change, expected in (({}, [0, 1]), ({"seed": 0}, [0])):
        calls.clear()
        written = raw(data={**RAW["data"], **change})
        for point in sweeps.plan(written, ["seed=0..1", "partition.alpha=0.1,1.0"]).points:
            described = running.data_description(point.config)
            parts.get("data", described, lambda point=point: running.load_data(point.config))
        assert calls == expected


def test_no_more_parts_of_a_kind_are_held_than_asked_for():
    """An old model goes before a new one is made: two may not fit into memory."""
    parts, held = Parts(most=1), []

    class Model:
        def __init__(self, name):
            self.name = name

    def make(name):
        alive = [one() for one in held if one() is not None]
        assert not alive
        held.append(weakref.ref(made := Model(name)))
        return made

    for name, count in (("a", 1), ("a", 1), ("b", 2), ("a", 3)):
        given = parts.get("model", name, lambda name=name: make(name)).name
        assert (given, len(held)) == (name, count)


def test_an_argument_of_the_algorithm_has_one_table_under_both_names():
    optimizer = {"name": "sgd", "learning_rate": 0.5}
    flat = small(optimizer=optimizer, aggregator="median", algorithm="fedprox")
    nested = small("optimizer", algorithm={"name": "fedprox", "optimizer": {"name": "sgd"}})
    for overrides in (
        ["algorithm.optimizer.learning_rate=0.5", "algorithm.aggregator=median"],
        ["optimizer.learning_rate=0.5", "aggregator.name=median"],
    ):
        assert configs.resolve(configs.methods(nested, overrides)[""]) == configs.resolve(flat)
    swept = sweeps.plan(nested, ["algorithm.optimizer.learning_rate=0.1,0.2", "seed=0..1"])
    rates = [point.config["optimizer"]["learning_rate"] for point in swept.points]
    assert sorted(rates) == [0.1, 0.1, 0.2, 0.2]
    assert set(swept.keys) == {"seed", "optimizer.learning_rate"}
    with pytest.raises(fp.InputError, match=r"optimizer twice"):
        configs.methods({**nested, "optimizer": {"name": "adam"}}, ["seed=1"])


def test_a_single_value_gives_the_runs_that_several_values_have():
    """So that each job of an array can take one seed of a study."""
    table = {"grid": {"optimizer.learning_rate": [1e-3, 1e-2]}}
    written = raw(table, methods=METHODS)
    for texts, single in (
        (["seed=0..2"], ["seed=1"]),
        (["seed=0..2", "peft.rank=4,8"], ["seed=1", "peft.rank=4,8"]),
        (["optimizer.learning_rate=1e-3,1e-2", "seed=0..2"], ["seed=1"]),
        (["seed=0..2"], ["seed=1..1", "optimizer.learning_rate=1e-3"]),
        (["methods.fedlr.seed=0..2"], ["methods.fedlr.seed=1"]),
    ):
        whole = {point.folder: point for point in sweeps.plan(written, texts).points}
        some = sweeps.plan(written, single).points
        assert len(some) < len(whole)
        assert [whole[point.folder] for point in some] == some


def test_methods_alone_are_swept():
    methods = {**METHODS, "ditto": {"algorithm": "ditto"}}
    expected = [f"{name}/seed=0" for name in methods]
    assert folders(sweeps.plan(raw(methods=methods))) == expected
    assert folders(sweeps.plan(raw(methods=methods), ["seed=0"])) == expected
    assert folders(sweeps.plan(raw(), ["seed=3"])) == ["seed=3"]
    refused("Nothing is swept", sweeps.plan, raw(), ["rounds=3"])


def test_several_methods_are_named_both_ways():
    methods = {**METHODS, "a,b": {"algorithm": "ditto"}, "other": {"peft": "ia3"}}
    for names in (["fedlr", "a,b"], ["fedlr", "a,b", "fedlr"]):
        planned = sweeps.plan(raw(methods=methods), ["seed=0"], names)
        assert folders(planned) == ["fedlr/seed=0", "a,b/seed=0"]
    planned = sweeps.plan(raw(methods=methods), ["seed=0"], ["fedlr,other"])
    assert folders(planned) == ["fedlr/seed=0", "other/seed=0"]
    refused(r"no \[methods.fedl\]", sweeps.plan, raw(methods=METHODS), ["seed=0"], ["fedprox,fedl"])
