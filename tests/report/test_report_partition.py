"""The report of a partition: its numbers, tables and figures."""

import csv
import io
import json
import math

import numpy as np
import pytest
import tomli_w
from closeness import approx
from internals import cli
from internals import partition as partition_report
from rich.console import Console
from shallow import draw_nothing
from small_config import small

import fedjax_peft as fp
from fedjax_peft import testing
from fedjax_peft.data import partition
from fedjax_peft.report import partition_files
from fedjax_peft.report.figure_files import PAPER

pytestmark = pytest.mark.slow


def federation(classes=3, clients=4, n=120):
    labels = (np.arange(n) % classes).astype(np.int32)
    names = tuple(f"kind {i}" for i in range(classes))
    meta = {"client": np.array([f"user {i % 7}" for i in range(n)])}
    data = fp.Dataset({"labels": labels}, names, "toy", meta=meta)
    return partition.dirichlet(data, clients, 0.3, mode="class_wise", min_size=0)


def printed(table):
    console = Console(width=80, file=None, record=True, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_the_numbers_equal_those_of_the_partition():
    clients = federation()
    report = partition_report.inspect(clients, "a title")
    content = json.loads(json.dumps(partition_report.summary(report)))
    assert (content["clients"], content["examples"], content["unowned"]) == (4, 120, 0)
    assert content["client_sizes"] == clients.sizes.tolist()
    assert content["size"]["min"] == clients.sizes.min()
    assert content["size"]["quantiles"]["0.5"] == np.median(clients.sizes)
    assert np.sum(content["histogram"], axis=0).tolist() == [40, 40, 40]
    distances = fp.heterogeneity.js_divergence(content["histogram"])
    assert content["mean_divergence"] == approx(distances[~np.eye(4, dtype=bool)].mean())


@pytest.mark.parametrize(
    ("measure", "base", "words", "limit"),
    [
        ("js", 2, "Jensen-Shannon, base 2", 1),
        ("js_sqrt", math.e, "Jensen-Shannon, square root, base e", math.sqrt(math.log(2))),
        ("jeffreys", 2, "Jeffreys / 2", None),
    ],
)
def test_measures(measure, base, words, limit):
    report = partition_report.inspect(federation(clients=12), measure=measure, base=base)
    assert report.measure == words
    assert report.limit == approx(limit)
    image = partition_files.heat_map(report).axes[0].images[0]
    totals = np.asarray(image.get_array()).sum(axis=1)
    assert np.all(np.diff(totals) <= 0), "the most distant come first"
    assert image.get_clim()[1] == approx(limit or report.divergence.max())


def test_tables_fit_80_columns():
    report = partition_report.inspect(federation(classes=40, clients=30, n=4000))
    lines = printed(partition_report.class_table(report))
    assert lines[1] == "Label Total 0 1 2 3 4 5"
    assert len(lines) == 2 + partition_report.TABLE_CLASSES + 2
    assert lines[-3].startswith("21 others 2,100 ")
    assert lines[-2].startswith("Total 4,000 ")
    assert lines[-1] == "24 more clients are in partition.json."
    assert printed(partition_report.size_table(report))[0] == "Clients 30"


def test_names_of_users_and_examples_without_a_client():
    clients = partition.natural(federation().data, clients=3, min_size=1)
    report = partition_report.inspect(clients, by="client")
    assert report.classes == tuple(f"user {i}" for i in range(7))
    assert partition_report.summary(report)["unowned"] == 120 - clients.sizes.sum()
    assert "without a client" in printed(partition_report.size_table(report))[1]
    assert printed(partition_report.class_table(report))[1].endswith(" ".join(clients.names))


def test_clients_without_examples_have_no_distance():
    data = np.array([0, 0, 1, 1])
    rows = [np.array(r, np.int32) for r in ([0, 2], [], [1, 3])]
    report = partition_report.inspect(fp.Clients(data, tuple(rows)))
    assert report.compared.tolist() == [0, 2]
    assert report.divergence.tolist() == [[0, 0], [0, 0]]


def test_data_without_classes_have_sizes(tmp_path):
    clients = partition.iid(fp.Dataset({"x": np.zeros((9, 2))}), 2)
    report = partition_report.inspect(clients)
    assert [path.name for path in partition_files.write(report, tmp_path)] == ["partition.json"]
    lines = printed(partition_report.size_table(report))
    assert lines[2] == "Per client 4 to 5, mean 4.5"
    assert not any(line.startswith("Classes") for line in lines)


@pytest.mark.parametrize("clients", [20, 31])
def test_figures_label_clients_by_name_if_there_are_few(clients):
    report = partition_report.inspect(federation(3, clients, 600), "toy")
    below = partition_files.composition(report).axes[1]
    square = partition_files.heat_map(report).axes[0]
    for axis in (below.xaxis, square.xaxis, square.yaxis):
        written = [label.get_text() for label in axis.get_ticklabels()]
        assert sorted(written, key=int) == (list(map(str, range(20))) if clients == 20 else [])


@pytest.mark.parametrize(("classes", "clients"), [(3, 4), (20, 100), (22, 1100), (1, 1)])
@pytest.mark.sample("3-4", "22-1100")
def test_figures_are_legible(classes, clients, tmp_path):
    report = partition_report.inspect(federation(classes, clients, 6000), "toy: dirichlet")
    fig = partition_files.composition(report)
    above, below = fig.axes
    layers = below.collections[: min(classes, 20)]
    colors = {tuple(layer.get_facecolor()[0]) for layer in layers}
    assert len(colors) == len(layers), "no two classes of one colour"
    names = [text.get_text() for text in fig.legends[0].get_texts()]
    assert names[0] == (f"{classes - 19} others" if classes > 20 else f"kind {classes - 1}")
    assert below.get_xlim()[1] == min(clients, partition_files.BARS) - 0.5
    assert above.get_ylabel() == "Examples"
    heat = partition_files.heat_map(report)
    few = f", 1,000 of {clients:,} clients" if clients > 1000 else ""
    assert heat.axes[0].get_xlabel() == f"Clients by their mean distance{few}"
    assert fig.get_facecolor()[:3] == (1, 1, 1)
    assert PAPER == "#ffffff"
    if clients > 4:
        return
    for path in partition_files.write(report, tmp_path / "made")[1:]:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.with_suffix(".svg").exists()
        assert path.with_suffix(".pdf").exists()
    with (tmp_path / "made" / "partition_classes.csv").open() as file:
        counts = list(csv.DictReader(file))
    assert sum(int(row["examples"]) for row in counts) == report.sizes.sum()


def test_equal_partitions_are_reported_once():
    one = {
        "model": {"name": "m", "source": "auto"},
        "data": {"name": "d"},
        "partition": {"name": "dirichlet", "clients": 5, "by": None},
        "seed": 0,
    }
    other = {**one, "partition": {"name": "natural", "by": "client"}}
    configs = {"a": one, "b": {**one, "rounds": 3}, "c": other, "d": {**one, "seed": 1}}
    assert list(partition_report.distinct_partitions(configs)) == ["a", "c", "d"]
    assert partition_report.title(one) == "d: dirichlet(clients=5)"
    own = {**one, "partition": {"name": "/x/my.py:split", "parts": 2, "seed": None}}
    assert partition_report.title(own) == "d: my.py:split(parts=2)"
    assert partition_report.classes_key(other) is None
    by = {**one, "partition": {"name": "iid", "by": "cluster"}}
    assert partition_report.classes_key(by) == "cluster"


def test_names_with_special_characters_are_drawn(tmp_path):
    names = ("$\\frac{$", "$$$", "\x1b[2J", "[/red]", "東京\u202e", "a\nb")
    data = fp.Dataset({"labels": np.arange(60, dtype=np.int32) % 6}, names, "toy")
    parts = tuple(np.split(np.arange(60), 6))
    report = partition_report.inspect(fp.Clients(data, parts, names), "".join(names))
    assert len(partition_files.write(report, tmp_path)) == 3
    text = io.StringIO()
    for table in (partition_report.size_table(report), partition_report.class_table(report)):
        Console(file=text, width=80).print(table)
    assert "\x1b" not in text.getvalue()
    assert "\u202e" not in text.getvalue()


def test_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    report = partition_report.inspect(federation())
    with pytest.raises(partition_files.InputError, match="cannot be created"):
        partition_files.write(report, tmp_path / "file" / "inside")


def test_the_command_needs_no_weights(tmp_path, capsys, monkeypatch):
    draw_nothing(monkeypatch)
    testing.write_tiny_checkpoint(tmp_path / "model")
    testing.write_tiny_texts(tmp_path / "data", train=80, test=10)
    (tmp_path / "model" / "model.safetensors").unlink()
    path = tmp_path / "small.toml"
    tables = {"model": str(tmp_path / "model"), "data": str(tmp_path / "data")}
    partition = {"name": "dirichlet", "clients": 5, "alpha": 0.5}
    path.write_text(tomli_w.dumps(small(**tables, partition=partition)))
    out = tmp_path / "out"
    command = ["partition", str(path), "--out", str(out), "--measure", "js_sqrt", "--base", "e"]
    assert cli.main([*command, "partition.clients=8", "seed=3"]) == 0
    shown = capsys.readouterr().out
    assert "square root, base e" in shown
    assert shown.splitlines()[-1] == str(out / "partition_divergence.png")
    content = json.loads((out / "partition.json").read_text())
    assert content["clients"] == 8
    assert content["title"] == "data: dirichlet(clients=8, alpha=0.5)"
    assert cli.main([*command, "--by", "clinet"]) == 2
    assert "has no 'clinet' to partition by" in capsys.readouterr().err
