"""Figures show the right points, and their labels do not overlap."""

import io
import re
from itertools import combinations

import pytest
from closeness import approx
from refusals import refused

from fedjax_peft.report import chart
from fedjax_peft.report.figure_files import PALETTE, render, styles
from fedjax_peft.report.inline_svg import svg
from fedjax_peft.report.plots import curve_data, curves
from fedjax_peft.report.wording import unit_of

PNG = b"\x89PNG\r\n\x1a\n"


def rows(rounds=3, top=0.8, size=1_000_000):
    numbers = range(rounds + 1)
    scores = [{"test_accuracy": top * r / max(rounds, 1), "test_loss": 3.0 - r} for r in numbers]
    cost = {"bytes_up": size, "bytes_down": size, "simulated_seconds": 100.0}
    costs = [{"round": r, **{n: x * (r > 0) for n, x in cost.items()}} for r in numbers]
    costs = [row | {"time": {"train_s": 60.0 * (row["round"] > 0)}} for row in costs]
    return [one | other for one, other in zip(costs, scores, strict=True)]


def drawn(fig):
    """Returns x and y of the curves: lines in data coordinates with more than one point."""
    ax = fig.axes[0]
    lines = [line for line in ax.lines if line.get_transform() == ax.transData]
    return [line.get_xydata().tolist() for line in lines if line.get_linestyle() != "None"]


def look(line):
    """Returns the colour and the dash pattern of a line."""
    return line.get_color(), str(line._dash_pattern)


def texts(fig):
    """Returns the texts in the axes and in the legend."""
    legend = [text for one in fig.legends for text in one.get_texts()]
    return [text.get_text() for text in (*fig.axes[0].texts, *legend)]


def test_curves_are_in_the_units_of_their_axes():
    fig = curves({"fra": rows()}, "bytes")
    assert fig.axes[0].get_xlabel() == "Communication, up and down (MB)"
    assert fig.axes[0].get_ylabel() == "Test accuracy (%)"
    (points,) = drawn(fig)
    assert points[-1] == approx([6, 80])
    assert texts(fig) == ["fra"]


def test_other_axes_and_metrics_are_labelled():
    ax = curves({"a": rows()}, "simulated_seconds", "test_loss").axes[0]
    assert (ax.get_xlabel(), ax.get_ylabel()) == (
        "Simulated time (minutes)",
        "Test loss, lower is better",
    )
    ax = curves({"a": rows()}, "round", "client_accuracy_worst").axes[0]
    assert ax.get_ylabel() == "Client accuracy worst (%)"


def test_smooth_curves_are_rolling_means_and_their_data_have_both():
    (points,) = drawn(curves({"a": rows(4)}, "round", smooth=2))
    assert [y for _, y in points] == approx([0, 10, 30, 50, 70])
    last = curve_data({"a": rows(4)}, "round", smooth=2)[-1]
    assert last == approx({"name": "a", "round": 4, "test_accuracy": 0.8, "rolling_mean_2": 0.7})
    seeds = {"a": {0: rows(4), 1: rows(4, top=0.4)}}
    fig = curves(seeds, "round", "test_accuracy", smooth=2)
    (points,) = drawn(fig)
    assert texts(fig) == ["a (n = 2)"]
    assert [y for _, y in points] == approx([0, 7.5, 22.5, 37.5, 52.5])
    data = curve_data(seeds, "round", "test_accuracy", smooth=2)
    assert data[-1]["rolling_mean_2"] == approx(0.35)


def test_an_unknown_axis_is_an_input_error():
    refused("bytes", curves, {"a": rows()}, "byte")


@pytest.mark.parametrize("x", ["round", "bytes", "simulated_seconds", "wall_seconds"])
@pytest.mark.parametrize("runs", [{}, {"a": []}, {"a": [{"round": 0}]}, {"a": rows(0)}])
def test_runs_with_few_or_no_points_are_drawn(runs, x):
    fig = curves(runs, x)
    assert render(fig, "png").startswith(PNG)
    assert ("Nothing recorded" in texts(fig)) == (runs != {"a": rows(0)})


def test_runs_without_points_are_named_in_the_figure():
    fig = curves({"a": rows(), "b": [{"round": 0, "train_loss": 1.0}]}, "round")
    assert texts(fig) == ["a", "b (no points)"]


def test_a_run_without_simulated_time_has_no_points():
    still = [row | {"simulated_seconds": 0.0} for row in rows()]
    assert drawn(curves({"a": still}, "simulated_seconds")) == []


def test_the_texts_of_a_page_keep_their_digits():
    """Those of small losses, and of runs that are called by their learning rates."""
    small = [{"round": i, "test_loss": 0.0041 - 0.0013 * i} for i in range(3)]
    drawing = chart.chart({"lr=0.0003": {None: small}}, ["round"], "test_loss").drawings["round"]
    assert re.findall(r"<title>(.*?)</title>", drawing)[-1] == "Round 2: 0.0015 (lr=0.0003)"
    ticks = re.findall(r"<text[^>]*>(0\.\d+)</text>", drawing)
    assert len(ticks) == len({*ticks}) > 2
    assert not re.search(r'\bd="[^"]*\.\d{3}', drawing), "places have two decimals"


def test_the_chart_of_a_page_shows_some_points_of_many(monkeypatch):
    monkeypatch.setattr(chart, "MOST_POINTS", 20)
    drawn = chart.chart(
        {"a": {0: rows(20), 1: rows(20, top=0.4)}, "b": {0: rows(20)}}, ["round"], None
    )
    assert drawn.step == 3
    titles = re.findall(r"<title>(.*?)</title>", drawn.drawings["round"])
    shown = [0, 3, 6, 9, 12, 15, 18, 20]
    for name in "ab":
        own = [title.partition(":")[0] for title in titles if title.endswith(f"({name})")]
        assert own == [f"Round {r}" for r in shown]
    assert "Round 20: 60.0 ± 28.3 % (a)" in titles
    assert drawn.lasts == ["60.0 ± 28.3 %", "80.0 %"]
    assert drawn.drawings["round"].count('class="run-0"') == 2, "its mean and its band"


def test_the_values_of_a_logarithmic_axis_have_the_places_of_its_points():
    """The points without a cost are not there, and so are their values."""
    runs = {"a": {0: rows()}, "b": {0: rows(size=100_000_000)}}
    titles = re.findall(
        r"<title>(.*?)</title>", chart.chart(runs, ["bytes"], None).drawings["bytes"]
    )
    assert titles[:3] == ["2.00 MB: 26.7 % (a)", "4.00 MB: 53.3 % (a)", "6.00 MB: 80.0 % (a)"]
    assert titles[3:] == ["200 MB: 26.7 % (b)", "400 MB: 53.3 % (b)", "600 MB: 80.0 % (b)"]


def test_wall_time_is_the_sum_of_all_phases():
    clock = {"train_s": 2.0, "eval_s": 1.0}
    found = [{"round": r, "test_accuracy": 0.1 * r, "time": clock} for r in range(3)]
    (points,) = drawn(curves({"a": found}, "wall_seconds"))
    assert points == [approx(point) for point in ([3, 0], [6, 10], [9, 20])]


def test_very_different_costs_get_a_logarithmic_axis():
    near, far = rows(), rows(size=100_000_000)
    assert curves({"a": near, "b": near}, "bytes").axes[0].get_xscale() == "linear"
    fig = curves({"a": near, "b": far}, "bytes")
    assert fig.axes[0].get_xscale() == "log"
    assert all(x > 0 for points in drawn(fig) for x, _ in points)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_labels_of_twelve_long_names_do_not_overlap_or_leave_the_figure(spread):
    runs = {f"run-{i}-{'long' * 20}-{i}": rows(top=0.5 + spread * i / 30) for i in range(12)}
    fig = curves(runs, "round")
    fig.savefig(io.BytesIO(), format="png")
    boxes = [text.get_window_extent() for text in fig.legends[0].get_texts()]
    assert len(boxes) == 12
    assert not any(a.y0 < b.y1 and b.y0 < a.y1 for a, b in combinations(boxes, 2))
    assert all(fig.bbox.x1 >= box.x1 and fig.bbox.y1 >= box.y1 for box in boxes)
    assert all(box.y0 >= 0 for box in boxes)
    assert fig.axes[0].get_window_extent().width > 0.5 * fig.bbox.width
    assert len(set(texts(fig))) == 12  # shortened in the middle


def swatch(names, name):
    """Returns the style of a name's curve in a figure with other names."""
    fig = curves({n: rows() for n in names}, "round")
    return look(fig.legends[0].legend_handles[names.index(name)])


def test_a_run_looks_the_same_in_every_report():
    names = ["fedlr", "federa", "fra"]
    assert len(set(styles(names).values())) == 3
    for name in names:
        assert swatch(names, name) == swatch(names[::-1], name) == swatch([name], name)
    # A name that wants the colour of another one gives way, whatever their order.
    twin = next(f"x{i}" for i in range(99) if styles([f"x{i}"])[f"x{i}"] == styles(["fra"])["fra"])
    assert styles(["fra", twin]) == styles([twin, "fra"])
    assert len(set(styles(["fra", twin]).values())) == 2


def test_coincident_curves_are_all_visible():
    fig = curves(
        {"fedlr": rows(), "other": rows(top=0.5), "fra": rows(), "federa": rows()}, "round"
    )
    ax = fig.axes[0]
    lines = [li for li in ax.lines if li.get_transform() == ax.transData]
    lines = [line for line in lines if line.get_linestyle() != "None"]
    same = [line for line in lines if round(line.get_ydata()[-1]) == 80]
    widths = [line.get_linewidth() for line in same]  # in the order of drawing
    assert len(set(widths)) == 3
    assert widths == sorted(widths, reverse=True)
    assert min(line.get_linewidth() for line in lines) == widths[-1]


def test_the_axis_says_if_lower_is_better():
    less = [{**row, "headline": "perplexity", "headline_better": "lower"} for row in rows()]
    less = [{**row, "test_perplexity": 90.0 / (1 + row["round"])} for row in less]
    assert curves({"a": less}, "round").axes[0].get_ylabel() == "Test perplexity, lower is better"


def test_figures_are_the_same_bytes_when_repeated():
    text, again = (
        render(curves({"a": rows(), "b": rows(top=0.5)}, "round"), "svg").decode() for _ in range(2)
    )
    assert text == again
    assert "<dc:date>" not in text
    assert "var(--" not in text, "programs other than browsers read the file too"
    one, other = (svg(curves({"a": rows()}, "round"), prefix) for prefix in ("x-", "y-"))
    assert one != other
    assert one.replace("x-", "") == other.replace("y-", "")
    found = [set(re.findall(r'\bid="([^"]*)"', text)) for text in (one, other)]
    assert found[0]
    assert not found[0] & found[1]


def test_twelve_runs_have_different_styles():
    fig = curves({str(i): rows() for i in range(12)}, "round")
    assert len({look(line) for line in fig.legends[0].legend_handles}) == 12


def test_names_with_special_characters_are_drawn():
    names = ("$x$", "a\nb", "<script>", "漢字 😀", "\x1b[31m", "%s", "")
    fig = curves({name: rows() for name in names}, "round")
    assert render(fig, "png").startswith(PNG)
    assert "<script" not in svg(fig)
    assert len(texts(fig)) == len(names)
    assert not any("\n" in text for text in texts(fig))


def test_svg_is_one_element_with_css_colours():
    text = svg(curves({"a": rows()}, "round"))
    color = styles(["a"])["a"]
    assert text.startswith("<svg")
    assert text.endswith("</svg>")
    assert f"var(--run-{color}, {PALETTE[color]})" in text
    assert "var(--paper, #ffffff)" in text
    assert "<!--" not in text


def test_units():
    bytes_of, seconds_of = (0, 999, 1e3, 5e6, 2e9, 3e15), (0, 100, 120, 7199, 7200)
    assert [unit_of("bytes", n).symbol for n in bytes_of] == ["B", "B", "kB", "MB", "GB", "TB"]
    symbols = [unit_of("wall_seconds", n).symbol for n in seconds_of]
    assert symbols == ["s", "s", "min", "min", "h"]
