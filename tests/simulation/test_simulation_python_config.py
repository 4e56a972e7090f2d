"""``config.toml`` of runs that were started from Python: it says everything, or what it lacks."""

import dataclasses
import inspect
import json
import tomllib
import types

import jax
import numpy as np
import optax
import pytest
import toy
from internals import cli
from internals import config as configs
from options import run_options
from shallow import simple_encoder  # noqa: F401

import fedjax_peft as fp
from fedjax_peft.simulation.storage.calls import settings
from fedjax_peft.simulation.storage.record import config_text

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simple_encoder")]

ADAM = fp.optimizers.adamw(1e-2)
BERT = {**fp.testing.TINY_BERT, "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
OPTIONS = {"rounds": 2, "local_steps": 1, "batch_size": 4, "clients_per_round": 2, "seed": 11}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Returns the paths of a checkpoint, of a csv file with users, and of a folder of texts."""
    root = tmp_path_factory.mktemp("places")
    fp.testing.write_tiny_texts(root / "texts", train=40, test=16)
    lines = (root / "texts" / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    table = [f"{row['text']},{row['label']},user {i % 4}" for i, row in enumerate(rows)]
    (root / "rows.csv").write_text("\n".join(["text,label,client", *table]))
    checkpoint = fp.testing.write_tiny_checkpoint(root / "checkpoint")
    return types.SimpleNamespace(
        checkpoint=checkpoint, csv=root / "rows.csv", texts=root / "texts", root=root
    )


def arguments(places, *, algorithm=None, path=None, load=None, pretrained=True, **options):
    """Returns the arguments of a run whose seeds are all different."""
    words = fp.load_tokenizer(places.checkpoint)
    if pretrained:
        head = fp.heads.classification([f"class {i}" for i in (3, 1, 2, 0)])
        base = fp.load_model(places.checkpoint, head=head, seed=2)
        words = base.tokenizer
    else:
        base = fp.random_model(BERT, head=fp.heads.classification(4), seed=2)
    how = {"tokenizer": words, "max_length": 12, "seed": 3} | (load or {})
    data = fp.load_dataset(path or places.texts, **how)
    given = {
        "model": fp.attach(base, fp.lora(rank=2), seed=5),
        "algorithm": algorithm or fp.algorithms.fedavg(ADAM),
        "clients": fp.partition.dirichlet(data["train"], 4, 0.5, seed=7),
        "test": data["test"],
        **run_options(**{**OPTIONS, **options}),
    }
    return given, data


def table_of(given):
    """Returns what ``config.toml`` of a run would hold, as it is read."""
    bound = inspect.signature(fp.simulate).bind(**given)
    bound.apply_defaults()
    return tomllib.loads(config_text(settings(types.SimpleNamespace(**bound.arguments))))


def assert_made_again(given):
    """Asserts that the config of a run makes the same clients, tests, model and parts."""
    config = configs.resolve(table_of(given))
    data, clients = configs.federation(config)
    clients, tests = configs.evaluation_data(config, data, clients)
    evaluation = given.get("evaluation", fp.Evaluation())
    own = {name: getattr(evaluation, name) for name in ("client_test", "client_validation")}
    pairs = [(clients, given["clients"])]
    pairs += [(tests.get(name), given.get(name)) for name in ("test", "validation")]
    pairs += [(tests.get(name), one) for name, one in own.items()]
    for made, one in pairs:
        assert (made is None) == (one is None)
        for x, y in zip(
            jax.tree.leaves(contents(made)), jax.tree.leaves(contents(one)), strict=True
        ):
            np.testing.assert_array_equal(x, y)
    model = configs.build_model(config, data["train"].label_names, data["train"].vocabulary)
    for name in ("frozen", "trainable"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(model, name), getattr(given["model"], name)
        )
    assert model.labels == given["model"].labels
    assert fp.call_of(model.method) == fp.call_of(given["model"].method)
    assert fp.call_of(configs.build_algorithm(config)) == fp.call_of(given["algorithm"])
    assert fp.call_of(configs.build_privacy(config)) == fp.call_of(given.get("privacy"))
    records = configs.build_records(config, tests)
    for name in ("system", "placement"):
        assert dataclasses.asdict(records[name]) == dataclasses.asdict(
            given.get(name, type(records[name])())
        )
    return config


def contents(data):
    if data is None:
        return ()
    if isinstance(data, fp.Clients):
        return (
            list(data.indices),
            data.data.columns,
            list(data.weights if data.weights is not None else ()),
        )
    return data.columns


def rows_of(directory):
    """Returns the rows of a run without times."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in row.items() if name != "time"} for row in rows]


@pytest.mark.long("two runs of each case compile")
@pytest.mark.parametrize("case", ["fedavg", "fedprox"])
def test_the_command_line_repeats_a_run_of_python(case, places, tmp_path, capsys):
    if case == "fedavg":
        given, _ = arguments(places)
    else:
        scheduled = fp.schedules.scheduled(ADAM, fp.schedules.cosine(rounds=4))
        given, data = arguments(
            places,
            path=places.csv,
            pretrained=False,
            algorithm=fp.algorithms.fedprox(scheduled, mu=0.05, aggregator=fp.aggregators.fra()),
            transforms=[fp.transforms.clip_norm(1.0), fp.transforms.clip_norm(0.5)],
            privacy=fp.privacy.central(noise_multiplier=1.0, clip=1.0),
            sampling="poisson",
            failure_rate=0.2,
        )
        clients, held = fp.partition.dirichlet(data["train"], 4, 2.0, seed=7).holdout(0.3, seed=9)
        evaluation = fp.Evaluation(client_test=held, stop=fp.early_stop(target=1.1))
        given |= {"clients": clients, "evaluation": evaluation}
    run = fp.simulate(**given, out=tmp_path / "run")
    assert cli.main(["run", str(run.out / "config.toml"), "--out", str(tmp_path / "again")]) == 0
    assert rows_of(tmp_path / "again") == rows_of(run.out)
    again = fp.load_run(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, again.params, run.params)
    if case == "fedavg":  # each of the two ways continues the run of the other
        assert cli.main(["resume", str(run.out), "rounds=3"]) == 0
        longer = fp.simulate(**{**given, "rounds": 4}, out=run.out, resume=True)
        assert longer.metrics[-1]["round"] == 4
    capsys.readouterr()


def natural(places, split="test"):
    given, data = arguments(places, path=places.csv, load={"validation_share": 0.2})
    clients = fp.partition.natural(data["train"], min_size=2, seed=4)
    own = fp.partition.natural(data[split], names=clients.names, min_size=0)
    return given | {"clients": clients, "evaluation": fp.Evaluation(**{f"client_{split}": own})}


def held_out(places):
    given, data = arguments(places, load={"train_examples": 30})
    clients = fp.partition.quantity(data["train"], 3, alpha=1.0, seed=np.int64(8))
    clients, tests = clients.holdout(0.2, seed=6)
    clients, validation = clients.holdout(0.25, seed=6)
    evaluation = fp.Evaluation(client_test=tests, client_validation=validation)
    return given | {"clients": clients, "evaluation": evaluation, "test": None}


def vocabulary(places):
    data = fp.load_dataset(places.csv, vocabulary=40, validation_share=0.2, drop_missing=True)
    given, _ = arguments(places, pretrained=False)
    own = {"clients": fp.partition.iid(data["train"], 3), "validation": data["validation"]}
    return given | own | {"test": None}


def whole_model(places):
    given, _ = arguments(places, time_model=fp.TimeModel.preset("federa", spread=0.3))
    model = fp.load_model(places.checkpoint, head=fp.heads.classification(4, fresh=True), seed=6)
    return given | {"model": model}


def quantised(places):
    given, _ = arguments(
        places, algorithm=fp.algorithms.fedopt(ADAM, server=fp.optimizers.sgd(1.0))
    )
    plain = fp.load_model(places.checkpoint, head=fp.heads.classification(4))
    return given | {"model": fp.quantize(fp.attach(plain, fp.peft.ia3(), seed=1), "int8")}


@pytest.mark.parametrize(
    "make", [natural, held_out, vocabulary, whole_model, quantised], ids=lambda f: f.__name__
)
def test_a_config_makes_the_same_again(make, places):
    assert_made_again(make(places))


def test_paths_are_absolute(places, monkeypatch, tmp_path):
    monkeypatch.chdir(places.root)
    base = fp.load_model("checkpoint", head=fp.heads.classification(4))
    data = fp.load_dataset("texts", tokenizer=base.tokenizer)
    given, _ = arguments(places)
    given |= {"model": base, "clients": fp.partition.pooled(data["train"]), "test": data["test"]}
    config = table_of(given)
    assert config["model"]["name"] == str(places.checkpoint)
    assert config["data"]["name"] == str(places.texts)
    assert "tokenizer" not in config["data"]


def memory(places):
    given, _ = arguments(places)
    data = fp.testing.tiny_dataset(12)
    return given | {"clients": fp.partition.iid(data, 3), "test": data}


def changed(places):
    given, _ = arguments(places)
    model = given["model"]
    doubled = {name: 2 * x for name, x in model.trainable.items()}
    clients = dataclasses.replace(given["clients"], weights=np.ones(4))
    return given | {"model": model.replace(trainable=doubled), "clients": clients}


def other_data(places):
    given, data = arguments(places, algorithm=fp.algorithms.fedprox(ADAM)._replace(name="mine"))
    test = data["test"].take(np.arange(5))
    unused, _ = given["clients"].holdout(0.5)
    return given | {"test": test, "clients": unused, "validation": data["train"]}


def functions(places):
    given, _ = arguments(places)
    return given | {
        "algorithm": lambda p: fp.algorithms.fedprox(optax.sgd(p["rate"]), mu=p["mu"]),
        "values": {"rate": 0.1, "mu": 0.2},
        "evaluation": fp.Evaluation(stop=lambda rows: False),
        "task": fp.tasks.classification()._replace(headline="loss"),
    }


def rows_in_memory(places):
    given, _ = arguments(places)
    rows = [{"text": "w1 w2", "label": f"class {i % 4}"} for i in range(20)]
    own = fp.load_tokenizer(places.checkpoint)
    own.pad_token = "[UNK]"
    loaded = fp.load_dataset(rows, tokenizer=own)
    held = loaded["train"]
    return given | {"clients": fp.partition.iid(held, 3), "test": loaded["test"]}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (memory, {"data", "evaluation.global_test"}),
        (changed, {"model", "partition"}),
        (
            other_data,
            {"algorithm", "partition", "evaluation.global_test", "evaluation.global_validation"},
        ),
        (functions, {"optimizer", "values", "stop", "task"}),
        (rows_in_memory, {"data.name", "data.tokenizer"}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_config_names_what_it_lacks(make, named, places, tmp_path, capsys):
    (tmp_path / "config.toml").write_text(config_text(table_of(make(places))))
    (tmp_path / "environment.json").write_text("{}")
    assert cli.main(["run", str(tmp_path / "config.toml"), "--out", str(tmp_path / "out")]) == 2
    error = " ".join(capsys.readouterr().err.split())
    listed = error.removeprefix("fedjax-peft: ").partition(" not recorded: ")[0]
    listed = listed.removesuffix(" are").removesuffix(" is")
    assert {one.partition(" ")[0] for one in listed.replace("), ", ")\n").split("\n")} == named
    assert not (tmp_path / "out").exists()


@pytest.mark.long("a run compiles")
def test_what_no_reader_needs_may_be_missing(places, tmp_path, capsys):
    given, _ = arguments(places)
    optimizer = fp.schedules.scheduled(ADAM, lambda index: 1.0)
    given |= {"algorithm": fp.algorithms.fedprox(optimizer, mu=0.1)}
    given |= {"evaluation": fp.Evaluation(stop=lambda rows: False)}
    run = fp.simulate(**given, out=tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, fp.load_run(run.out).params, run.params)
    assert cli.main(["resume", str(run.out), "rounds=3"]) == 2
    error = capsys.readouterr().err
    assert "schedule (" in error
    assert "stop (" in error
    assert "are not recorded" in error
    assert len((run.out / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.long("three runs")
def test_points_of_a_sweep_say_their_models(places, tmp_path):
    given, _ = arguments(places)
    model, fixed = given.pop("model"), ("algorithm", "clients")
    plain = fp.load_model(places.checkpoint, head=fp.heads.classification(4))
    fp.sweep(
        lambda p: fp.attach(plain, model.method, seed=p["seed"]),
        given["algorithm"],
        given["clients"],
        points=fp.grid({"algorithm.optimizer.learning_rate": [1e-2]}, seed=[0, 1]),
        out=tmp_path / "sweep",
        **{name: x for name, x in given.items() if name not in (*fixed, "seed")},
    )
    for path in sorted((tmp_path / "sweep").glob("*/config.toml")):
        config = configs.resolve(configs.load(path))
        assert config["runtime"] == ["optimizer.learning_rate"]
        assert config["peft"]["seed"] == config["seed"]
    assert cli.main(["run", str(path), "--out", str(tmp_path / "again"), "-q"]) == 0
    assert rows_of(tmp_path / "again") == rows_of(path.parent)


def test_a_module_of_ones_own_is_named(tmp_path, capsys):
    out = tmp_path / "run"
    algorithm = fp.algorithms.fedavg(ADAM)
    run = fp.simulate(toy.model(), algorithm, toy.clients([4, 4]), rounds=1, out=out)
    assert cli.main(["run", str(run.out / "config.toml"), "--out", str(tmp_path / "again")]) == 2
    assert "model (a module of your own, or merged weights), data (" in capsys.readouterr().err


def test_values_of_calls_are_runtime_keys(places):
    given, _ = arguments(places, transforms=fp.transforms.clip_norm(1.0))
    scheduled = fp.schedules.scheduled(ADAM, fp.schedules.cosine(rounds=4))
    call = fp.call_of(fp.algorithms.fedprox(scheduled, mu=0.1))
    places_ = ("optimizer.optimizer.learning_rate", "optimizer.schedule.floor", "mu")
    known = [f"algorithm.{name}" for name in places_ if name in call.flat()]
    given |= {
        "algorithm": call.build(),
        "values": dict.fromkeys([*known, "transforms.max_norm"], 0.1),
    }
    config = table_of(given)
    assert config["runtime"][0] == "optimizer.learning_rate"
    assert config["runtime"][-1].startswith("transforms.clip_norm.")
    configs.resolve(config)
    for key in config["runtime"]:
        *tables, last = configs.key_parts(config, key)
        table = config
        for name in tables:
            table = table[name]
        assert last in table
