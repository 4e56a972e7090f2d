"""The style of figures prints in grey, bands are means over seeds, and files are reproducible."""

import csv
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from closeness import approx
from matplotlib.colors import to_rgb

from fedjax_peft.report.figure_files import (
    DASHES,
    MARKERS,
    PALETTE,
    bands,
    mean_band,
    rolling,
    save,
    style,
    subplots,
)

HERE = Path(__file__).parent


def lightness(color):
    """Returns CIE L* of a colour, from 0 (black) to 100."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 116 * float(np.dot([0.2126, 0.7152, 0.0722], linear)) ** (1 / 3) - 16


def test_methods_differ_in_grey():
    values = [lightness(color) for color in PALETTE]
    assert min(abs(a - b) for a, b in combinations(values, 2)) > 9
    assert max(values) < 75, "a lighter line is pale on paper"
    assert len(set(map(str, DASHES))) == len(set(MARKERS)) == len(PALETTE)


def draw():
    with style():
        fig, ax = subplots()
        data = bands(ax, "fedavg", [1, 2, 3], {0: [1.0, 2.0, 3.0], 7: [3.0, 2.0, 7.0]})
        data += bands(ax, "$fra$", [1, 2, 3], {0: [5.0, None, 6.0]})
        ax.legend()
    return fig, data


def test_a_band_is_one_standard_deviation_around_the_mean():
    fig, data = draw()
    (ax,) = fig.axes
    first, second = ax.lines
    assert first.get_xydata().tolist() == [[1, 2], [2, 2], [3, 5]]
    (band,) = ax.collections  # a single seed has none
    low, high = band.get_paths()[0].get_extents().get_points()
    deviation = np.std([3.0, 7.0], ddof=1)
    assert [low[1], high[1]] == approx([2 - np.std([1.0, 3.0], ddof=1), 5 + deviation])
    assert [line.get_label() for line in ax.lines] == ["fedavg (n = 2)", "$fra$ (n = 1)"]
    assert first.get_color() != second.get_color()
    assert first.get_marker() != second.get_marker()
    assert second.get_xydata().tolist() == [[1, 5], [3, 6]]
    assert len(data) == 8
    assert data[-1] == {"name": "$fra$", "seed": 0, "x": 3, "value": 6.0}


def test_a_name_has_one_style_in_all_axes_of_a_figure():
    fig, (left, right) = subplots(1, 2)
    bands(left, "a", [0], {0: [1.0]})
    bands(left, "b", [0], {0: [1.0]})
    bands(right, "b", [0], {0: [1.0]})
    assert right.lines[0].get_color() == left.lines[1].get_color() == PALETTE[1]
    assert fig.axes == [left, right]


def test_the_mean_covers_what_all_seeds_have():
    mean, deviation = mean_band([[1.0, 2.0, 3.0], [3.0, None]])
    assert mean.tolist()[0] == 2
    assert np.isnan(mean[1:]).all()
    assert np.isnan(deviation[1:]).all()
    assert mean_band([])[0].tolist() == []
    with pytest.raises(ValueError, match="3 values for 2"):
        bands(subplots()[1], "a", [0, 1], {0: [1.0, 2.0, 3.0]})


def test_rolling_is_the_mean_of_the_last_values():
    values = [1.0, 5.0, 3.0, 7.0, 2.0]
    assert rolling(values, 1) == values
    # By hand: the first two are means of one and of two values.
    assert rolling(values, 3) == approx([1, 3, 3, 5, 4])
    assert rolling(values, 9)[-1] == approx(18 / 5)
    with pytest.raises(ValueError, match="1 or more"):
        rolling(values, 0)


def test_save_writes_three_forms_and_the_data(tmp_path):
    fig, data = draw()
    paths = save(fig, tmp_path / "lr=0.1", data)
    assert [path.name for path in paths] == [f"lr=0.1.{f}" for f in ("png", "svg", "pdf", "csv")]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    png, svg, pdf = (path.read_bytes() for path in paths[:3])
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(png[16:20]) == 7.2 * 200
    assert svg.startswith(b"<?xml")
    assert pdf.startswith(b"%PDF")
    assert not any(word in svg + pdf for word in (b"<dc:date>", b"CreationDate"))
    with paths[3].open() as file:
        read = list(csv.DictReader(file))
    assert len(read) == 8
    assert read[0] == {"name": "fedavg", "seed": "0", "x": "1", "value": "1"}


def test_data_are_plain_numbers(tmp_path):
    rows = [{"a": np.float32(0.1), "b": None}, {"b": float("nan"), "c, d": 3}]
    save(subplots()[0], tmp_path / "new" / "f", rows)
    assert (tmp_path / "new" / "f.csv").read_text() == 'a,b,"c, d"\n0.100000001,,\n,,3\n'


@pytest.mark.exhaustive
def test_files_are_the_same_bytes_in_another_process(tmp_path):
    """Also if Python hashes texts in another way; and only drawing imports matplotlib."""
    save(*(lambda fig, data: (fig, tmp_path / "a", data))(*draw()))
    code = (
        f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent / 'helpers')]!r}\n"
        "from fedjax_peft.report import plots\n"
        "assert 'matplotlib' not in sys.modules\n"
        "fig = plots.curves({'a': [{'round': 0, 'test_accuracy': 0.1}]}, 'round')\n"
        "assert b'PNG' in fig._repr_png_()\n"
        "import test_report_figure_files as t\n"
        f"fig, data = t.draw(); t.save(fig, {str(tmp_path / 'b')!r}, data)\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    seed = {**os.environ, "PYTHONHASHSEED": "3"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=seed)
    for form in ("png", "svg", "pdf", "csv"):
        a, b = (tmp_path / f"{name}.{form}" for name in "ab")
        assert a.read_bytes() == b.read_bytes(), form
