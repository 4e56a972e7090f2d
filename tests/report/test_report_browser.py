"""The report's page in a browser: headless Chromium through Playwright, skipped without them.

Neither is among the test requirements, because both are large: ``pip install playwright`` and any
Chromium, named by the variable ``CHROMIUM`` if it is not on the path.
"""

import json
import os
import shutil
import threading
from itertools import pairwise

import pytest
from toy_sweeps import write_run

from fedjax_peft.report import live
from fedjax_peft.report.page import render_report, write_report
from fedjax_peft.report.study import read_study

pytestmark = pytest.mark.slow

NAMES = ("Chromium", "chromium", "chromium-browser", "google-chrome", "chrome")


def rows(top, size, rounds=4):
    tests = {"client": list(range(3)), "accuracy": [top, 0.1, 0.05 + top / 2]}
    return [
        {
            "round": r,
            "test_accuracy": top * r / rounds,
            "test_examples": 100,
            "bytes_up": size * (r > 0),
            "simulated_seconds": 30.0 * (r > 0),
            "time": {"train_s": 2.0},
            **({"client_tests": tests} if r == rounds else {}),
        }
        for r in range(rounds + 1)
    ]


def write_runs(folder):
    """Writes two methods with two seeds each."""
    for name, top, size in (("large", 0.8, 10**6), ("small", 0.6, 10**3)):
        for seed in range(2):
            config = {"name": name, "algorithm": name, "seed": seed}
            write_run(folder / f"{name}{seed}", config, rows(top + 0.1 * seed, size))
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = write_runs(tmp_path_factory.mktemp("browser"))
    return write_report(read_study(folder), folder).as_uri()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with playwright.sync_playwright() as running:
        path = path or running.chromium.executable_path
        if not os.path.exists(path):
            pytest.skip("there is no Chromium: set CHROMIUM to its path")
        opened = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser):
    """Function (address, options of the context) -> page; no message or foreign request is made."""
    contexts, seen = [], []

    def open_page(address, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: seen.append(message.text))
        page.on("pageerror", lambda error: seen.append(str(error)))
        page.on("request", lambda one: seen.append(one.url) if off(one.url, address) else None)
        page.goto(address)
        return page

    def off(url, address):
        return not url.startswith(("data:", address))

    yield open_page
    for context in contexts:
        context.close()
    assert seen == []


def texts(page, selector):
    return [text for text in page.locator(selector).all_inner_texts() if text]


def visible(page, selector):
    return page.locator(selector).locator("visible=true").count()


def values(page):
    """Returns the lines of the box with the values."""
    return page.locator(".values:visible").inner_text().split("\n")


def test_the_axis_is_chosen_and_runs_are_switched_off(visit, report):
    page = visit(report)
    assert visible(page, ".plot") == 1
    assert visible(page, ".by-round") == 1
    page.check("#axis-wall_seconds")
    assert (visible(page, ".plot"), visible(page, ".by-wall_seconds")) == (1, 1)
    assert visible(page, ".by-wall_seconds .run-0") > 0
    page.uncheck("#show-0")
    assert visible(page, ".run-0") == 0
    assert visible(page, ".run-1") > 0


def test_values_are_shown_under_the_pointer(visit, report):
    page = visit(report, viewport={"width": 1300, "height": 900})
    page.check("#axis-bytes")
    plot = page.locator(".by-bytes")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 10, box["y"] + box["height"] / 2)
    assert values(page) == ["4 MB", "large", "85.0 ± 7.1 %", "small", "65.0 ± 7.1 %"]
    line = page.locator(".by-bytes .line").bounding_box()
    marks = page.locator(".by-bytes .at-ease .run-0 use").all()
    ends = max(mark.bounding_box()["x"] + mark.bounding_box()["width"] / 2 for mark in marks)
    assert line["x"] == pytest.approx(ends, abs=1.5), "the line is where the curve's point is"
    page.uncheck("#show-0")
    plot.hover()
    assert values(page)[1] == "small"
    page.mouse.move(0, 0)
    assert visible(page, ".values") == 0


def test_values_are_read_from_the_keyboard(visit, report):
    page = visit(report, viewport={"width": 420, "height": 900})
    plot = page.locator(".by-round")
    plot.focus()
    assert plot.get_attribute("role") == "slider"
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    assert values(page)[0] == "Round 1"
    text = "Round 1, large 21.2 ± 1.8 %, small 16.2 ± 1.8 %"
    assert plot.get_attribute("aria-valuetext") == text
    page.keyboard.press("End")
    assert values(page)[0] == "Round 4"
    page.keyboard.press("Escape")
    assert visible(page, ".values") == 0


def test_tables_are_sorted_by_a_click_on_a_heading(visit, report):
    page = visit(report, viewport={"width": 1200, "height": 900})
    table = page.get_by_role("region", name="Single clients")
    clients = table.locator("tbody th")
    assert clients.all_inner_texts() == ["0", "1", "2"]
    table.get_by_role("button", name="large").click()
    assert clients.all_inner_texts() == ["0", "2", "1"]
    head = table.locator("th", has_text="large")
    assert head.get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")
    assert clients.all_inner_texts() == ["1", "2", "0"]
    assert head.get_attribute("aria-sort") == "ascending"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_width_and_colour_scheme_is_readable(visit, report, scheme):
    page = visit(report, color_scheme=scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    for width in (320, 500, 800, 1200, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        chart = page.locator(".chart").bounding_box()
        svg = page.locator(".plot:visible svg:visible").bounding_box()
        legend = page.locator(".legend").bounding_box()
        assert chart["width"] >= min(0.9 * width, 1300), "the width is used"
        beside = legend["y"] < svg["y"] + svg["height"] / 2
        assert beside == (width > 1024)
        assert svg["width"] >= 0.7 * chart["width"]
        boxes = [one.bounding_box() for one in page.locator("main > *:visible").all()]
        assert all(a["y"] + a["height"] <= b["y"] + 1 for a, b in pairwise(boxes)), "no overlap"


def test_the_print_has_the_names_of_the_shown_curves(visit, report):
    page = visit(report, viewport={"width": 718, "height": 1000})
    page.uncheck("#show-1")
    page.emulate_media(media="print")
    assert texts(page, ".legend label >> visible=true")[0].startswith("large")
    assert visible(page, ".legend label") == 1
    assert visible(page, "input") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 718


def test_the_page_is_complete_without_scripts(visit, report):
    page = visit(report, java_script_enabled=False)
    page.locator("#axis-bytes").check()
    assert (visible(page, ".plot"), visible(page, ".by-bytes")) == (1, 1)
    page.locator("#show-0").uncheck()
    assert visible(page, ".run-0") == 0
    assert visible(page, "table") > 3


def test_a_watched_page_renews_itself_and_keeps_what_was_chosen(visit, tmp_path):
    folder = write_runs(tmp_path / "runs")

    def render(version):
        return render_report(read_study(folder, unfinished=True), version=version)

    with live.server([folder], render) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            page = visit(f"http://127.0.0.1:{server.server_port}/")
            page.check("#axis-bytes")
            page.uncheck("#show-0")
            with (folder / "small0" / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(rows(0.9, 10**3, rounds=5)[-1]) + "\n")
            page.get_by_text("different lengths: 4 to 5 rounds").wait_for(timeout=60_000)
            assert page.is_checked("#axis-bytes")
            assert not page.is_checked("#show-0")
        finally:
            server.shutdown()
            thread.join()
