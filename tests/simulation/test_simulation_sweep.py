"""``fp.sweep``: one program for all numbers and seeds, the results of single runs, and resume."""

import ast
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import toy
from closeness import approx, assert_close
from compiled import compilations
from internals import Points, Replicas, _Shared, named_points, program, read_toml
from options import run_options
from refusals import refused
from running import CLIENTS as FEDERATION

import fedjax_peft as fp
from fedjax_peft import InputError, random_model
from fedjax_peft.simulation.points import Job, PointDone, Results
from fedjax_peft.simulation.stopping import median_rule

pytestmark = pytest.mark.slow

TEST, VALIDATION = toy.dataset(20, seed=5), toy.dataset(20, seed=6)
GIVEN = {
    **{"rounds": 2, "clients_per_round": 3, "batch_size": 4, "local_steps": 2, "lanes": 1},
    **{"test": TEST, "validation": VALIDATION},
}
OPTIONS = run_options(**GIVEN)
POINTS = fp.grid(seed=range(3), rate=[0.05, 0.2], mu=[0.1, 1.0])


def make(p):
    return fp.algorithms.fedprox(optax.sgd(p["rate"]), mu=p["mu"])


@pytest.fixture(scope="module")
def model():
    return toy.model()


@pytest.fixture(scope="module")
def swept(model):
    return fp.sweep(model, make, FEDERATION, points=POINTS, **OPTIONS)


def test_grid_varies_seeds_least_often_and_keeps_the_order_of_names():
    assert fp.grid(rate=[1.0, 2.0], seed=[0, 1]) == [
        {"rate": 1.0, "seed": 0},
        {"rate": 2.0, "seed": 0},
        {"rate": 1.0, "seed": 1},
        {"rate": 2.0, "seed": 1},
    ]
    refused("no values for 'rate'", fp.grid, rate=[])


def test_a_point_has_the_results_of_a_single_run(swept, model):
    point = POINTS[7]
    name = next(n for n, p in swept.points.items() if p == point)
    single = fp.simulate(model, make(point), FEDERATION, seed=point["seed"], **OPTIONS)
    for leaf, value in single.params.items():
        assert_close(swept.runs[name].params[leaf], value, rtol=1e-5, atol=1e-6)
    mine, its = (run.metrics[-1]["test_loss"] for run in (swept.runs[name], single))
    assert mine == approx(its, rel=1e-5)


DOTTED = {"algorithm.optimizer.learning_rate": [0.05, 0.2], "algorithm.mu": [0.1, 1.0]}


def test_values_take_the_place_of_arguments_of_a_call(swept, model):
    plain = fp.algorithms.fedprox(fp.optimizers.sgd(1.0), mu=0.5)
    called = fp.sweep(model, plain, FEDERATION, points=fp.grid(DOTTED, seed=range(3)), **OPTIONS)
    compilations.clear()
    more = fp.grid({"algorithm.optimizer.learning_rate": [0.3], "algorithm.mu": [0.7, 0.2]})
    fp.sweep(model, plain, FEDERATION, points=more, **OPTIONS)
    assert not compilations
    rows = [[run.metrics[-1]["test_loss"] for run in one.runs.values()] for one in (swept, called)]
    assert rows[0] == approx(rows[1], rel=1e-5)
    assert len(set(rows[1])) == 12
    assert {"algorithm.mu": 0.1, "algorithm.optimizer.learning_rate": 0.2} in [
        {key: x for key, x in point.items() if key != "seed"} for point in called.points.values()
    ]


def test_constants_of_a_call_are_values_too(model):
    transforms = fp.transforms.top_k(0.5)
    points = fp.grid({"transforms.share": [0.25, 1.0], "algorithm.weights": ["size", "uniform"]})
    plain = fp.algorithms.fedavg(fp.optimizers.sgd(0.1))
    swept = fp.sweep(model, plain, FEDERATION, points=points, transforms=transforms, **OPTIONS)
    sent = {
        point["transforms.share"]: swept.runs[name].metrics[-1]["bytes_up"]
        for name, point in swept.points.items()
    }
    assert sent[0.25] < sent[1.0]
    losses = {run.metrics[-1]["test_loss"] for run in swept.runs.values()}
    assert len(losses) == 4


@pytest.mark.parametrize(
    ("algorithm", "key", "named"),
    [
        (fp.algorithms.fedavg(fp.optimizers.sgd(0.1)), "algorithm.muu", "no argument 'muu'"),
        (fp.algorithms.fedprox(fp.optimizers.sgd(0.1)), "algoritm.mu", "'algorithm.mu'"),
        (fp.algorithms.fedprox(fp.optimizers.sgd(0.1))._replace(name="x"), "algorithm.mu", "call"),
        (fp.algorithms.fedprox(optax.sgd(0.1)), "algorithm.optimizer.learning_rate", "optimizer"),
    ],
)
def test_a_value_that_no_call_takes_is_refused_by_name(model, algorithm, key, named):
    with pytest.raises(InputError) as error:
        fp.sweep(model, algorithm, FEDERATION, points=fp.grid({key: [0.1, 0.2]}), **OPTIONS)
    assert named in str(error.value)


def test_numbers_and_seeds_share_one_program(swept, model):
    compilations.clear()
    more = fp.grid(seed=[7, 8], rate=[0.01, 0.3], mu=[0.2])
    fp.sweep(model, make, FEDERATION, points=more, **OPTIONS)
    assert not compilations


def test_a_constant_compiles_once_for_each_of_its_values(monkeypatch):
    compiled = []
    build = program.Program._function
    monkeypatch.setattr(
        program.Program, "_function", lambda self: compiled.append(self) or build(self)
    )
    fp.sweep(
        lambda p: toy.lora_model(width=p["width"]),
        lambda p: fp.algorithms.fedavg(optax.sgd(p["rate"])),
        FEDERATION,
        points=fp.grid(seed=[0, 1], rate=[0.1, 0.2], width=[6, 8]),
        **run_options(**{**GIVEN, "test": None, "validation": None}),
    )
    assert len(compiled) == 2


def test_the_algorithm_before_the_model_is_refused(model):
    wrong = (make, model, FEDERATION)
    refused("Give the model first", fp.sweep, *wrong, points=POINTS[:1], **OPTIONS)


def test_best_is_chosen_by_its_mean_over_seeds(swept):
    assert repr(swept) == "Sweep(12 points, 4 settings; .table() and .best())"

    def mean(settings, metric):
        runs = [swept.runs[n] for n, p in swept.points.items() if settings.items() <= p.items()]
        assert len(runs) == 3
        return np.mean([run.metrics[-1][metric] for run in runs])

    settings = [{"rate": r, "mu": m} for r in (0.05, 0.2) for m in (0.1, 1.0)]
    expected = min(settings, key=lambda one: mean(one, "validation_loss"))
    best = swept.best("validation_loss")
    assert {key.removeprefix("point."): x for key, x in best.settings.items()} == expected
    assert sorted(best.runs) == [0, 1, 2]
    text = swept.table("validation_loss").markdown()
    assert f"{mean(expected, 'validation_loss'):.1f}" in text
    assert len(text.splitlines()) == 2 + len(settings)
    refused("validation_los", swept.best, "validation_los")


def test_a_sweep_skips_what_is_finished_and_continues_what_is_not(tmp_path, model, swept):
    points, seen = POINTS[:3], []

    def again(done: PointDone):
        seen.append((done.job.name, done.seconds is None))

    def interrupted(row):
        if row["round"] == 1:
            raise KeyboardInterrupt

    def run(**options):
        return fp.sweep(
            model,
            options.pop("algorithm", make),
            options.pop("clients", FEDERATION),
            points=points,
            out=tmp_path / "s",
            on_point=again,
            **run_options(**{**GIVEN, "checkpoint_every": 1, **options}),
        )

    names = list(swept.points)[:3]
    fp.sweep(model, make, FEDERATION, points=points[:1], out=tmp_path / "s", **OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        run(on_round=interrupted)
    assert seen == [(names[0], True)]
    seen.clear()
    resumed = run()
    assert seen == [(names[0], True), (names[1], False), (names[2], False)]
    for name in names[1:]:
        for leaf, value in swept.runs[name].params.items():
            np.testing.assert_array_equal(resumed.runs[name].params[leaf], value)
    assert fp.load_run(tmp_path / "s" / names[0], model=model).metrics[-1]["round"] == 2
    assert len(resumed.study.cells) == 3
    others = {"batch_size": 2, "clients": toy.clients((7, 4, 12, 9, 1)), "rounds": 1}
    for name, value in others.items():
        seen.clear()
        refused(rf"3 of 3 runs.*another config: {name}", run, **{name: value})
        assert seen == [(one, True) for one in names]
        assert len(list((tmp_path / "s").glob("*/metrics.jsonl"))) == 3
    with pytest.raises(InputError, match=r"another config: .*step_size"):
        run(algorithm=lambda p: fp.algorithms.fedprox(optax.sgd(10 * p["rate"]), mu=p["mu"]))


def test_a_failure_is_named_after_the_other_points_have_run(tmp_path, model):
    points = [{"seed": 0, "rate": 0.1, "mu": -1.0}, {"seed": 0, "rate": 0.1, "mu": 1.0}]
    with pytest.raises(InputError, match=r"1 of 2 runs.*mu=-1.0: mu = -1.0 of fedprox must be"):
        fp.sweep(model, make, FEDERATION, points=points, out=tmp_path / "s", **OPTIONS)
    assert (tmp_path / "s" / "seed=0,rate=0.1,mu=1.0" / "metrics.jsonl").exists()


def test_a_point_without_memory_does_not_stop_those_after_it(tmp_path, model):
    def clients(p):
        if p["seed"] == 0:
            raise MemoryError("Unable to allocate 8 TiB")
        return FEDERATION

    points = fp.grid(seed=[0, 1], rate=[0.1], mu=[1.0])
    with pytest.raises(InputError, match=r"1 of 2 runs.*not enough memory: Unable to allocate"):
        fp.sweep(model, make, clients, points=points, out=tmp_path, **OPTIONS)
    assert (tmp_path / "seed=1,rate=0.1,mu=1.0" / "params.safetensors").exists()
    with pytest.raises(MemoryError):  # one after the other they may have room
        fp.sweep(model, make, clients, points=points, replicas=2, **OPTIONS)


def test_wrong_points_are_refused(model):
    def run(points, **options):
        fp.sweep(model, make, FEDERATION, points=points, **run_options(**GIVEN, **options))

    refused("no points", run, [])
    refused("'mu' is not in all of them", run, [{"rate": 0.1, "mu": 1.0}, {"rate": 0.2}])
    refused("occurs twice", run, [{"rate": 0.1, "mu": 1.0}] * 2)
    refused("give choose_by", run, POINTS, early_stop=True)


def row(index, **values):
    return {"round": index, "headline": "accuracy", "headline_better": "higher", **values}


def test_the_median_rule_stops_a_run_that_is_worse_than_the_median_of_the_others():
    # Row 0, before training, does not count.
    finished = [[row(0, a=-9.0), row(1, a=x), row(2, a=x + 0.2)] for x in (0.2, 0.4, 0.6)]
    rule = median_rule(finished, "a")  # means up to round 2: 0.3, 0.5, 0.7
    assert rule([row(1, a=0.41), row(2, a=0.51)]) is None
    assert "worse than 0.5, the median of 3" in rule([row(1, a=0.45), row(2, a=0.49)])
    assert rule([row(1, a=0.41)]) is None  # the median after round 1 is 0.4
    assert rule([row(0, a=9.0), row(1, a=0.39)])
    assert median_rule(finished[:2], "a")([row(1, a=0.0)]) is None
    losses = median_rule(finished, "validation_loss")
    assert losses([row(1, validation_loss=9.0)]) is None  # the others did not record it
    falling = [[row(1, validation_loss=x)] for x in (0.2, 0.4, 0.6)]
    assert median_rule(falling, "validation_loss")([row(1, validation_loss=0.5)])
    assert median_rule(falling, "validation_loss")([row(1, validation_loss=0.3)]) is None
    assert median_rule(falling, "global_validation_loss")([row(1, validation_loss=0.5)])


def test_the_best_point_so_far_is_chosen_by_a_metric_of_the_global_model():
    jobs, seen = [Job(name, 1, lambda *_: None) for name in "ab"], []
    results = Results(jobs, None, "global_validation_loss", on_point=seen.append)
    for job, loss in zip(jobs, (0.4, 0.2), strict=True):
        results.end(job, [row(1, validation_loss=loss)])
    assert [one.best for one in seen] == [("a", 0.4), ("b", 0.2)]


def test_points_side_by_side_have_the_results_of_points_one_after_the_other(swept, model, tmp_path):
    # 5 points in groups of 3: the second group is not full. Cohorts and lengths differ by seed.
    points = [POINTS[i] for i in (0, 1, 4, 7, 8)]
    out = tmp_path / "s"
    together = fp.sweep(model, make, FEDERATION, points=points, out=out, replicas=3, **OPTIONS)
    assert list(together.points) == list(together.runs)
    for name, run in together.runs.items():
        for leaf, value in swept.runs[name].params.items():
            assert_close(run.params[leaf], value, rtol=1e-5, atol=1e-6)
        for mine, its in zip(run.metrics, swept.runs[name].metrics, strict=True):
            for field in ("train_loss", "test_loss", "validation_accuracy", "update_norm"):
                assert (field in mine) == (field in its)
                assert mine.get(field, 0.0) == approx(its.get(field, 0.0), rel=1e-4)
            assert mine.get("clients") == its.get("clients")
    assert (out / "sweep.toml").exists()


def test_a_point_that_fails_beside_others_does_not_stop_them(model, tmp_path):
    points = [{"seed": s, "rate": 0.1, "mu": m} for s, m in ((0, -1.0), (1, 1.0), (2, 0.5))]
    with pytest.raises(InputError, match="1 of 3 runs"):
        fp.sweep(model, make, FEDERATION, points=points, out=tmp_path, replicas=3, **OPTIONS)
    assert len(list(tmp_path.glob("*/params.safetensors"))) == 2


def test_conditions_of_replicas_are_not_batched(model):
    """A batched condition would compute both of its branches in every step."""
    session = fp.session(
        model,
        make,
        FEDERATION,
        values={"rate": 0.1, "mu": 0.1},
        placement=fp.Placement(engine=Replicas(2).program, lanes=2),
        batch_size=4,
    )
    state, plan = session.init(), session.plan(1)
    one = session.program(plan)
    arguments = one._stack([one._arguments(state, plan, 1)])

    def conditions(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "cond":
                yield equation.invars[0].aval.shape
            if equation.primitive.name == "while":
                yield equation.params["cond_jaxpr"].jaxpr.outvars[0].aval.shape
            for value in jax.tree.leaves(list(equation.params.values())):
                if hasattr(value, "jaxpr"):
                    yield from conditions(getattr(value.jaxpr, "jaxpr", value.jaxpr))

    found = list(conditions(jax.make_jaxpr(one._round())(*arguments).jaxpr))
    assert len(found) >= 3  # the loop, and the beginning and the end of clients
    assert set(found) == {()}


def seeded_model(seed):
    """Returns a model whose forward pass, not its leaves, depends on a seed."""
    plain, shift = toy.model(dropout=0), 0.5 * seed

    def apply(frozen, trainable, batch, key, train):
        return plain.apply(frozen, trainable, {**batch, "x": batch["x"] + shift}, key, train)

    return plain.replace(apply=apply)


READS = {
    "unpacked": lambda p: (lambda width, **_: width)(**p),
    "copied": lambda p: dict(p)["width"],
    "items": lambda p: next(value for name, value in p.items() if name == "width"),
    "values": lambda p: list(p.values())[1],
    "merged": lambda p: (p | {})["width"],
    "get": lambda p: p.get("width"),
    "a match": lambda p: matched(p),
    "a text": lambda p: ast.literal_eval(str(p))["width"],
    "formatted": lambda p: int("{width}".format(**p)),
    "compared": lambda p: 6 if p == {"seed": 0, "width": 6} else 8,
}


def matched(p):
    match p:
        case {"width": width}:
            return width


@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
def test_every_way_of_reading_a_point_is_noted(read):
    shared = _Shared(lambda p: toy.lora_model(width=read(p)))
    made = [shared(point) for point in fp.grid(seed=[0], width=[6, 8])]
    assert [model.trainable["layer.lora_b"].shape[1] for model in made] == [6, 8]


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.__setitem__("width", 9),
        lambda p: p.pop("width"),
        lambda p: p.update(width=9),
        lambda p: p.setdefault("depth", 9),
        lambda p: p.clear(),
    ],
)
def test_a_point_cannot_be_changed(change):
    with pytest.raises((AttributeError, TypeError)):
        _Shared(change)({"seed": 0, "width": 6})


def test_a_list_of_a_point_can_be_changed_without_harm():
    point = {"seed": 0, "layers": [1]}
    _Shared(lambda p: p["layers"].append(2))(point)
    assert point == {"seed": 0, "layers": [1]}


def test_what_reads_a_point_too_late_is_refused():
    later = _Shared(lambda p: lambda: p["width"])({"seed": 0, "width": 6})
    refused("reads 'width' after it has returned", later)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_forward_pass_is_shared_by_seeds_that_decide_initial_values_only(stacked):
    head = fp.heads.classification(4)
    plain = random_model(fp.testing.TINY_BERT, head=head, scan_layers=stacked)

    def forward_passes(make, name):
        points = Points(make, fp.algorithms.fedavg(optax.sgd(0.1)), toy.clients((2,)), {}, {})
        given = ({"seed": seed, name: value} for seed in (0, 1) for value in (2, 4))
        return [points.model(point).apply for point in given]

    own = forward_passes(lambda p: seeded_model(p["seed"]), "rate")
    assert own[0] is own[1] is not own[2] is own[3]
    made = forward_passes(
        lambda p: fp.attach(plain, fp.lora(dropout=p["dropout"] / 10), seed=p["seed"]), "dropout"
    )
    assert made[0] is made[2] is not made[1] is made[3]


def test_points_stay_in_the_directory_of_the_sweep_and_are_told_apart():
    values = ["../../escaped", "a/b", "a:b", "A:B", "1", 1, 1.0, True, None, "x" * 300, "\udcff\n"]
    names = list(named_points(fp.grid(kind=values)))
    assert len({name.casefold() for name in names}) == len(values)
    for name in names:
        assert Path(name).name == name
        assert len(name.encode()) <= 255
    assert names[:2] == ["kind=.._.._escaped", "kind=a_b"]
    assert list(named_points(fp.grid(seed=[0], rate=[0.1], layers=[(1, 2)]))) == [
        "seed=0,rate=0.1,layers=(1, 2)"
    ]


def test_values_may_be_lists_dicts_and_arrays(model, tmp_path):
    points = [
        {"seed": seed, "table": {"rates": [0.1, rate]}, "x": np.array([0.0, 1.0])}
        for seed, rate in ((0, 0.2), (1, 0.2))
    ]
    swept = fp.sweep(
        model,
        lambda p: fp.algorithms.fedavg(optax.sgd(p["table"]["rates"][int(p["x"][1])])),
        lambda p: toy.clients((7, 4, 12, 1, 9), seed=int(p["x"].sum())),
        points=points,
        out=tmp_path,
        **run_options(**{**GIVEN, "rounds": 1, "test": None, "validation": None}),
    )
    assert [len(cell.runs) for cell in swept.study.cells] == [2]
    folders = sorted(path.parent.name for path in tmp_path.glob("*/config.toml"))
    assert folders == sorted(swept.points)
    recorded = read_toml(tmp_path / next(iter(swept.points)) / "config.toml")["point"]
    assert recorded == {"seed": 0, "table": {"rates": [0.1, 0.2]}, "x": [0.0, 1.0]}
    refused("occurs twice", named_points, [points[0], {**points[0], "x": np.array([0.0, 1.0])}])
