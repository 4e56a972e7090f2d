"""Names of classes decide what labels mean, in every way in which data meet a model."""

import functools
import json
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
import tomli_w
import toy
from closeness import approx
from internals import class_numbers, cli, numbered, read_metrics
from options import run_options
from refusals import refused
from running import FEDAVG, SIZES
from shallow import simple_encoder  # noqa: F401
from small_config import small

import fedjax_peft as fp
from fedjax_peft import InputError, testing
from fedjax_peft.simulation.classes import in_models_classes
from fedjax_peft.simulation.simulate import arguments

pytestmark = pytest.mark.slow

MODEL = toy.model(dropout=0)
NAMES = MODEL.labels
CLIENTS, TEST = toy.clients(SIZES), toy.dataset(20, seed=5)


# ------------------------------------------------------------------------------------ spellings


def written(data, names, renamed=None):
    """Returns the rows of a data set whose classes are in ``names``, with that list of names.

    The labels are looked up one by one, as a reader of a file does.

    Args:
      renamed: our name -> the name in the list; by default itself.
    """
    renamed = renamed or dict(zip(NAMES, NAMES, strict=True))
    there = [i for i, label in enumerate(data.labels) if renamed.get(NAMES[label]) in names]
    kept = data.take(np.array(there))
    labels = [names.index(renamed[NAMES[label]]) for label in kept.labels]
    return replace(
        kept, columns={**kept.columns, "labels": np.array(labels, np.int32)}, label_names=names
    ), kept


NUMBERS = dict(zip(NAMES, ("0", "1", "2"), strict=True))
FILES = {
    "turned": (NAMES[::-1],),
    "without the first class": (NAMES[1:],),
    "without the last class": (NAMES[:2],),
    "with a class that nobody has": (("a class", *NAMES),),
    "numbers": (("0", "1", "2"), NUMBERS),
    "numbers without the second": (("0", "2"), NUMBERS),
    "no names": (numbered(3), dict(zip(NAMES, numbered(3), strict=True))),
}
"""Files of the same examples -> the list of names that reading them gives, and other names."""
FOREIGN = {
    "another class": (*NAMES[:2], "another"),
    "numbers from 1": ("1", "2", "3"),
    "another case": (*NAMES[:2], "Class 2"),
}
"""Lists of names, of which the model does not know the last one."""


# ----------------------------------------------------------------------------------------- ways


def run(model=MODEL, clients=CLIENTS, **options):
    options = {"rounds": 1, "local_steps": 1, "batch_size": 4, "progress": False, **options}
    return fp.simulate(model, FEDAVG, clients, **run_options(**options))


def scores(result):
    return {k: v for k, v in result.metrics[-1].items() if k.startswith(("test", "val", "client"))}


def own(data):
    """Returns clients who have examples of the data set by turns."""
    rows = np.arange(len(data), dtype=np.int32)
    return fp.Clients(data, tuple(rows[i :: len(SIZES)] for i in range(len(SIZES))))


def trained(result):
    return {name: np.asarray(x).tolist() for name, x in result.params.items()}


@functools.cache
def finished():
    return run()


@functools.cache
def session(after=False):
    model = finished().trained if after else MODEL
    return fp.session(model, FEDAVG, CLIENTS, local_steps=1, batch_size=4)


def derivative(data):
    opened = session()
    return jax.jit(fp.differentiable.loss(opened, data))(opened.init(0)).tolist()


def swept(search, data, **options):
    options |= run_options(rounds=1, local_steps=1, batch_size=4, test=data, progress=False)
    return search(MODEL, lambda p: fp.algorithms.fedavg(optax.sgd(p["rate"])), CLIENTS, **options)


def sweep(data):
    (result,) = swept(fp.sweep, data, points=[{"rate": 0.1}]).runs.values()
    return scores(result)


def tune(data):
    def space(trial):
        return {"rate": trial.suggest_categorical("rate", [0.1])}

    tuned = swept(fp.tune, data, space=space, trials=1, choose_by="test_loss")
    return [trial.value for trial in tuned.study.trials]


WAYS = {
    "clients": lambda data: trained(run(clients=own(data))),
    "session's clients": lambda data: (
        fp.session(MODEL, FEDAVG, own(data), local_steps=1, batch_size=4).columns["labels"].tolist()
    ),
    "test": lambda data: scores(run(test=data)),
    "validation": lambda data: scores(run(validation=data)),
    "client_test": lambda data: scores(run(client_test=own(data))),
    "client_validation": lambda data: scores(run(client_validation=own(data))),
    "Session.evaluate": lambda data: session().evaluate(session().init(0), data),
    "differentiable.loss": derivative,
    "sweep": sweep,
    "tune": tune,
    "origin's clients": lambda data: trained(run(finished().trained, own(data), origin=finished())),
    "origin's test": lambda data: scores(run(finished().trained, test=data, origin=finished())),
    "a finished run": lambda data: session(after=True).evaluate(session(after=True).init(0), data),
    "a model by number": lambda data: scores(run(MODEL.replace(labels=numbered(3)), test=data)),
    "a module of one's own": lambda data: scores(run(MODEL.replace(labels=()), test=data)),
    "after a model by number": lambda data: scores(
        run(run(MODEL.replace(labels=numbered(3))).trained, test=data)
    ),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample("*-turned", "test-*", "clients-*")
def test_names_decide_in_every_way_in(way, file):
    """The numbers are those of the same rows with the model's names, in every bit."""
    data, same = written(TEST, *FILES[file])
    assert WAYS[way](data) == WAYS[way](same)


@pytest.mark.parametrize("file", FOREIGN)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample("*-another class", "test-*")
def test_unknown_names_are_refused_in_every_way_in(way, file):
    names = FOREIGN[file]
    data, _ = written(TEST, names, dict(zip(NAMES, names, strict=True)))
    with pytest.raises(InputError, match=rf"'{names[2]}', and the .*the classes 'class 0', 'cl"):
        WAYS[way](data)


@pytest.mark.parametrize(
    ("known", "names", "numbers"),
    [
        ("abc", "abc", None),
        ("abc", "ab", None),
        ("abc", "cab", [2, 0, 1]),
        ("abc", "c", [2]),
        ("abc", "012", None),
        ("abc", "02", [0, 2]),
        ("012", "12", [1, 2]),
        ("210", "012", [2, 1, 0]),
        (numbered(3), "bca", None),
        ("abc", numbered(3), None),
        (("a", "b", "LABEL_2"), "abc", None),
        (("false", "true"), ("True", "False"), [1, 0]),
        (("1.0", "2.0"), "21", [1, 0]),
        ("abc", "12", "'1', '2'"),
        ("012", "abc", "'a', 'b', 'c'"),
        ("abc", "bcd", "'d'"),
        (("no", "yes"), ("No", "yes"), "'No'"),
        ("123", "01", "'0'"),
        ("abc", ("0", "a"), "'0'"),
        ("abc", ("LABEL_1", "LABEL_2"), [1, 2]),
        (numbered(3), ("LABEL_1", "LABEL_2"), [1, 2]),
        (numbered(3), "123", None),
        (("a", "b", "LABEL_2"), "bc", "'c'"),
    ],
)
def test_numbers_of_names(known, names, numbers):
    if isinstance(numbers, str):
        with pytest.raises(InputError, match=f"Data has the class(es)? {numbers}, and it has the"):
            class_numbers(known, names, "Data", "it")
        return
    found = class_numbers(known, names, "Data", "it")
    assert (found if found is None else found.tolist()) == numbers


def test_data_whose_numbers_agree_are_not_copied():
    """What other parts of a run compute from them, such as the noise of its privacy, stays."""
    own_names = own(replace(TEST, label_names=(*NAMES, "nobody's")))
    opened = fp.session(MODEL, FEDAVG, own_names, local_steps=1, batch_size=4)
    assert opened.columns["x"] is not None
    assert opened.read(TEST) is TEST
    turned, _ = written(TEST, NAMES[::-1])
    assert opened.read(turned).columns["x"] is turned.columns["x"]


def test_examples_that_clients_hold_out_stay_in_the_data_of_the_clients():
    """Both are one object, which is once on the device."""
    data, _ = written(TEST, NAMES[::-1])
    train, held = own(data).holdout(0.25)
    how = fp.Evaluation(client_test=held)
    found = in_models_classes(
        arguments(MODEL, fp.algorithms.local(optax.sgd(0.1)), train, rounds=1, evaluation=how)
    )
    assert found.clients.data.labels.tolist() == (2 - data.labels).tolist()
    assert found.evaluation.client_test.data is found.clients.data


def test_tags_that_a_test_file_lacks_can_be_predicted():
    """Words without a label stay so, and predictions of a tag that no row has do have a name."""
    tags = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    columns = {"labels": np.array([[0, 2, -100], [1, -100, -100]], np.int32)}
    data = fp.Dataset(columns, ("O", "B-PER", "I-PER"), "tags")
    model = MODEL.replace(labels=tags)
    read = fp.session(model, FEDAVG, CLIENTS_BY_NUMBER, local_steps=1, batch_size=4).read
    assert read(data).labels.tolist() == [[0, 4, -100], [3, -100, -100]]
    for names in (tags[:3], ("0", "1", "2"), numbered(3)):
        assert read(replace(data, label_names=names)).label_names == tags


CLIENTS_BY_NUMBER = replace(CLIENTS, data=replace(CLIENTS.data, label_names=numbered(3)))


def test_two_classes_of_one_name_are_refused():
    with pytest.raises(InputError, match="Two classes of the data set 'toy' have the name 'a'"):
        replace(TEST, label_names=("a", "b", "a"))


def test_more_names_than_the_head_has_classes():
    """Names of classes that nobody has do not matter; others are an error."""
    model = MODEL.replace(labels=numbered(3))
    more = replace(TEST, label_names=(*NAMES, "class 3"))
    assert scores(run(model, own(more), test=more)) == scores(run(model, own(TEST), test=TEST))
    labels = np.full_like(TEST.labels, 3)
    odd = replace(more, columns={**TEST.columns, "labels": labels})
    refused("'toy' has the class 'class 3', and the model", run, model, own(odd))


def test_a_model_by_number_gets_the_names_of_its_training_data(tmp_path):
    """Its run keeps them; and it reads runs whose model the user names in another order."""
    by_number = run(MODEL.replace(labels=numbered(3)), out=tmp_path)
    assert by_number.model.labels == NAMES
    for labels in (NAMES[::-1], numbered(3)):
        model = MODEL.replace(labels=labels)
        loaded = fp.load_run(tmp_path, model=model, algorithm=FEDAVG)
        assert loaded.trained.labels == NAMES
    with pytest.raises(InputError, match="The model has the class 'x', and the run has"):
        fp.load_run(tmp_path, model=MODEL.replace(labels=("x", *NAMES[1:])), algorithm=FEDAVG)


@pytest.mark.long("three commands, two of which need the run of the first")
@pytest.mark.usefixtures("simple_encoder")
def test_a_config_starts_from_a_run_with_more_classes(tmp_path, capsys, monkeypatch):
    """The file of the new run lacks the first class, and another file has an unknown one."""
    monkeypatch.chdir(tmp_path)
    testing.write_tiny_checkpoint(tmp_path / "model")
    testing.write_tiny_texts(tmp_path / "all", train=24, test=12)
    for name, renamed in {"some": "class 1", "other": "class 9"}.items():
        (tmp_path / name).mkdir()
        for split in ("train.jsonl", "test.jsonl"):
            rows = [json.loads(row) for row in (tmp_path / "all" / split).read_text().splitlines()]
            rows = [row for row in rows if row["label"] != "class 0"]
            rows = [row | {"label": row["label"].replace("class 1", renamed)} for row in rows]
            (tmp_path / name / split).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = small(model={"name": "model"}, data={"name": "all", "max_length": 16}, local_steps=1)
    (tmp_path / "c.toml").write_text(tomli_w.dumps(config))
    again = ["run", "c.toml", "-q", "--from", "a", "--out"]
    assert cli.main(["run", "c.toml", "--out", "a", "-q"]) == 0
    assert cli.main([*again, "b", "data.name=some"]) == 0
    assert cli.main([*again, "c", "data.name=other"]) == 2
    assert "has the class 'class 9', and the model has the classes" in capsys.readouterr().err
    run = fp.load_run("a")
    assert run.model.labels == ("class 0", "class 1", "class 2", "class 3")
    texts = [json.loads(row) for row in (tmp_path / "some" / "test.jsonl").read_text().splitlines()]
    found = run.predict([row["text"] for row in texts]).argmax(axis=1)
    right = [run.model.labels[i] == row["label"] for i, row in zip(found, texts, strict=True)]
    assert read_metrics("b/metrics.jsonl")[0]["test_accuracy"] == approx(np.mean(right))
