"""Figures of clients, layers, spectra and local models show the recorded values."""

import csv
import math
import re
from pathlib import Path

import numpy as np
import pytest
from closeness import approx, assert_close
from internals import RunRecord, client_distribution, local_models, make_study, page, summary
from shallow import draw_nothing

from fedjax_peft.report import chart
from fedjax_peft.report import details as details_module
from fedjax_peft.report.details import details, heat_map, spectra
from fedjax_peft.report.figure_files import render
from fedjax_peft.report.layers import HEAT_MAPS

LAYERS = [f"encoder.layer.{i}.attention.{part}.lora" for i in (0, 2, 10) for part in "qv"]


def rows(rounds=4, clients=20, seed=0, error=1.0):
    rng = np.random.default_rng(seed)
    found = []
    for r in range(rounds + 1):
        row = {"round": r, "headline": "accuracy", "test_accuracy": 0.2 * r}
        if r:
            values = rng.uniform(size=clients).tolist()
            row |= {
                "clients": list(range(clients)),
                "client_tests": {"client": list(range(clients)), "accuracy": values},
                "local_accuracy": [0.1 * r + 0.01 * c for c in range(clients)],
                "effective_rank": 1.0 + r,
                "spectrum_kept": 0.9,
                "layers": {
                    "aggregation_error": {
                        path: error * r * (i + 1) for i, path in enumerate(reversed(LAYERS))
                    }
                },
            }
        found.append(row)
    return found


@pytest.fixture(scope="module")
def runs():
    return {"fedlr": {0: rows(), 1: rows(seed=1)}, "$fra$": {0: rows(seed=2), 1: rows(seed=3)}}


def test_rows_without_data_give_no_figure():
    plain = [{"round": 0, "test_accuracy": 0.5}, {"round": 1, "test_accuracy": 0.6}]
    assert list(details({"a": {0: plain}, "b": {0: []}})) == []
    assert list(details({})) == []


def test_the_distribution_over_clients_is_that_of_the_last_evaluation(runs):
    found = client_distribution(runs)
    pooled = np.sort([x for s in (0, 1) for x in rows(seed=s)[-1]["client_tests"]["accuracy"]])
    (ax,) = found.figure.axes
    line = next(line for line in ax.lines if line.get_label() == "fedlr")
    xs, ys = line.get_xdata()[1:-1], line.get_ydata()[1:-1]
    assert_close(xs, 100 * pooled)
    assert_close(ys, 2.5 * np.arange(1, 41))
    assert line.get_drawstyle() == "steps-post"
    # By hand: the worst tenth of forty clients is four of them.
    assert f"fedlr {100 * pooled[:4].mean():.3g} %" in found.caption
    assert "all seeds are pooled" in found.caption
    assert len(found.data) == 80
    assert found.data[0].keys() == {"name", "seed", "client", "accuracy"}


def test_the_worst_clients_are_the_highest_where_lower_is_better():
    less = [row | {"headline": "loss", "headline_better": "lower"} for row in rows(clients=10)]
    less[-1]["client_tests"] = {"client": list(range(10)), "loss": [float(i) for i in range(10)]}
    found = client_distribution({"a": {0: less}})
    assert "their mean: a 9." in found.caption
    (ax,) = found.figure.axes
    assert ax.lines[0].get_markevery() == [*range(1, 11)], "no mark at the ends, without a client"
    assert ax.patches[0].get_y() == 90


@pytest.mark.parametrize(("clients", "worst"), [(10, 1), (11, 2), (15, 2), (25, 3)])
def test_the_worst_tenth_is_that_of_the_table(clients, worst):
    tested = [row | {"client_accuracy_mean": 0.5} for row in rows(clients=clients)]
    scores = sorted(tested[-1]["client_tests"]["accuracy"])
    expected = sum(scores[:worst]) / worst
    assert summary(tested)["client_worst_tenth"] == approx(expected)
    assert (
        f"their mean: a {100 * expected:.3g} %." in client_distribution({"a": {0: tested}}).caption
    )


def test_heat_maps_show_each_layer_in_each_round(runs):
    found = heat_map(runs, "aggregation_error")
    fig = found.figure
    maps = [ax for ax in fig.axes if ax.images]
    assert [ax.get_title(loc="left") for ax in maps] == ["fedlr", "$fra$"]
    names = [text.get_text() for text in maps[0].get_yticklabels()]
    assert names == [f"{i}.attention.{part}" for i in (0, 2, 10) for part in "qv"]
    values = maps[0].images[0].get_array()
    assert_close(values, np.outer(range(6, 0, -1), range(1, 5)))
    assert len({id(ax.images[0].norm) for ax in maps}) == 1, "one scale of colours"
    assert "means over seeds" in found.caption
    assert found.data[0] == {"name": "fedlr", "layer": LAYERS[0], "round": 1} | {
        "aggregation_error": 6.0
    }


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_heat_maps_of_very_different_values_are_logarithmic(error):
    found = heat_map({"a": {0: rows()}, "b": {0: rows(error=1e-6)}}, "aggregation_error")
    assert "logarithmic" in found.caption
    constant = heat_map({"a": {0: rows(error=error)}}, "aggregation_error")
    assert "logarithmic" not in constant.caption
    for one in (found, constant):
        assert render(one.figure, "svg").startswith(b"<?xml")


def test_names_and_values_that_no_program_writes_are_drawn():
    """A file that somebody has damaged can have them."""
    found = rows(clients=2)
    found[1]["clients"] = [1, 1]
    found[2]["layers"]["aggregation_error"] = {"\ud800": 1.0, "b": math.nan, "c": math.inf}
    for one in details({"<b>": {0: found}}):
        assert render(one.figure, "svg").startswith(b"<?xml")


def test_few_clients_have_a_line_each_with_a_rolling_mean():
    few = {"fedlr": {0: rows(clients=2)}}
    found = local_models(few, smooth=2)
    fig = found.figure
    first, second, model = fig.axes[0].lines
    names = [text.get_text() for text in fig.legends[0].get_texts()]
    assert names == ["Client 0", "Client 1", "Global model"]
    assert first.get_ydata() == approx([10, 15, 25, 35])
    assert second.get_ydata() == approx([11, 16, 26, 36])
    assert model.get_ydata() == approx([0, 10, 30, 50, 70])
    assert "rolling means over 2 evaluated rounds" in found.caption
    assert len(found.data) == 8
    assert "rolling" not in local_models(few).caption


def test_many_clients_have_their_mean_and_deviation(runs):
    found = local_models(runs)
    fig = found.figure
    line, _ = fig.axes[0].lines
    assert line.get_ydata() == approx([10 * r + 9.5 for r in range(1, 5)])
    assert len(fig.axes[0].collections) == 1
    assert "first seed" in found.caption


def test_a_client_without_a_finite_upload_has_no_point():
    some = rows(clients=2)
    some[2]["local_accuracy"][1] = None
    line = local_models({"a": {0: some}}).figure.axes[0].lines[1]
    assert list(line.get_xdata()) == [1, 3, 4]


def test_spectra_have_one_panel_for_each_recorded_measure(runs):
    fig = spectra(runs).figure
    left, right = fig.axes
    assert left.lines[0].get_ydata() == approx([2, 3, 4, 5])
    assert right.lines[0].get_ydata() == approx([90] * 4)
    assert [text.get_text() for text in fig.legends[0].get_texts()] == [
        "fedlr (n = 2)",
        "$fra$ (n = 2)",
    ]


@pytest.mark.slow
def test_the_page_shows_all_figures_and_writes_their_files(runs, tmp_path, monkeypatch):
    draw_nothing(monkeypatch)
    records = [
        RunRecord(name, tmp_path / name, {"name": name}, {}, by_seed[0])
        for name, by_seed in runs.items()
    ]
    text = page.write_report(records, tmp_path, smooth=3, x="bytes").read_text()
    stems = ["clients", "local_models", "spectra", "layers_aggregation_error"]
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    expected = {f"{s}.{form}" for s in stems for form in ("png", "svg", "pdf", "csv")}
    assert expected <= names
    assert not any("vs_round" in name for name in names)
    assert "Rolling means over 3 evaluated rounds." in text
    assert text.count("<figure>") == 4
    with (tmp_path / "figures" / "clients.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 40


def test_a_long_run_without_a_test_keeps_its_figures(monkeypatch):
    """Its evaluations are thinned by their own number, not by that of the curve's points."""
    monkeypatch.setattr(chart, "MOST_POINTS", 10)
    found = [row | {"train_loss": 1.0} for row in rows(rounds=40)]
    for row in found:
        del row["test_accuracy"]
        if row["round"] % 2:
            del row["headline"]
    thinned, step = page._thinned({"a": {0: found}})
    assert step == 3
    assert [row["round"] for row in thinned["a"][0]] == [0, 6, 12, 18, 24, 30, 36, 40]
    few, step = page._thinned({"a": {0: found[:19]}})
    assert (few["a"][0], step) == (found[:19], 1)


@pytest.mark.slow
def test_a_page_of_many_runs_is_small(monkeypatch):
    """Of 20 methods, 250 rounds and all heat maps it has at most 1.5 MB; here is a tenth of that.

    That is two methods and one heat map of 24 layers, in the resolution of 20 methods.
    """
    monkeypatch.setattr(chart, "MOST_POINTS", chart.MOST_POINTS // 10)
    kind = "effective_rank"
    monkeypatch.setattr(details_module, "HEAT_MAPS", {kind: HEAT_MAPS[kind]})
    rng = np.random.default_rng(0)
    found = {name: rows(rounds=250, seed=seed) for seed, name in enumerate("ab")}
    for row in found["a"][1:] + found["b"][1:]:
        row |= {kind: rng.uniform(1, 2), "test_accuracy": rng.uniform()}
        row["local_accuracy"] = rng.uniform(size=20).tolist()
        row["layers"] = {kind: {f"layer.{i}.query": rng.uniform(1, 2) for i in range(24)}}
    runs = [RunRecord(name, Path(name), {"name": name}, {}, one) for name, one in found.items()]
    text = page.render_report(make_study(runs))
    assert "One of 5 evaluated rounds is shown" in text
    images = set(re.findall(r"data:image/png;base64,[^\"]+", text))
    assert text.count("data:image/png") == len(images) == 3, "two maps and their scale"
    assert len(text) < 150_000
