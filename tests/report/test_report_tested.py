"""Which models a score is of: global and personal models are unlike, and stand apart."""

import csv

import pytest
from closeness import approx
from internals import load_run, main, make_study, read_study
from made_runs import write_run, write_sweep
from shallow import draw_nothing

from fedjax_peft.cli.resuming import note_methods
from fedjax_peft.report.cells import is_test
from fedjax_peft.report.comparison import Options, compare
from fedjax_peft.report.targets import targets
from fedjax_peft.report.tested import MODELS

SEEDS = (0.0, 0.02, -0.02)


@pytest.fixture(autouse=True)
def _figures(monkeypatch):
    draw_nothing(monkeypatch)


def rows(name, noise=0.0):
    """A round of `fedavg`, a global model; `local`, personal ones; or `ditto`, which has both."""
    scores = {"test_accuracy": 0.6 + noise, "test_examples": 100}
    if name != "fedavg":
        scores |= {"test_accuracy": 0.4 + noise, "test_count": 4, "test_accuracy_std": 0.1}
    if name == "ditto":
        scores |= {"global_test_accuracy": 0.55 + noise, "global_test_examples": 100}
    return [{"round": 0}, {"round": 1, **scores}]


@pytest.mark.parametrize(
    ("metric", "on_test"),
    [
        *((name, True) for name in ("test_f1", "global_test_f1", "tuned_client_f1_mean")),
        ("local_accuracy_mean", True),  # on the test set, before the aggregation
        *((name, False) for name in ("validation_f1", "client_validation_f1_mean", "train_loss")),
        *((name, False) for name in ("client_steps", "time.train_s", "per_client.loss")),
    ],
)
def test_what_is_measured_on_test_data(metric, on_test):
    assert is_test(metric) == on_test


def study(folder, *names):
    """Writes a sweep whose config has the methods in this order, and reads it."""
    runs = [
        ({"name": name, "seed": seed}, rows(name, noise))
        for name in names
        for seed, noise in enumerate(SEEDS)
    ]
    methods = {name: {"algorithm": {"name": name}} for name in names}
    return read_study(write_sweep(folder, runs, keys=["seed"], config={"methods": methods}))


def cells(shown, start):
    """Returns heading -> cells of the columns whose headings start so."""
    return {c.title: c.cells for c in shown.columns if c.title.startswith(start)}


def test_global_and_personal_models_have_columns_of_their_own(tmp_path):
    shown = compare(study(tmp_path / "s", "fedavg", "ditto"))
    assert cells(shown, "Final") == {
        "Final test accuracy of the global model (%)": ["60.0 ± 2.0", "55.0 ± 2.0"],
        "Final test accuracy of personal models (%)": ["-", "40.0 ± 2.0"],
    }
    # The difference is one of like models: it was -20.0, to the personal models.
    assert cells(shown, "Difference") == {"Difference to fedavg (points)": ["baseline", "−5.0"]}
    assert "final test accuracy of the global model" in shown.lead
    assert not any("unlike" in warning for warning in shown.warnings)
    assert any("personal models are means over" in text for text in shown.captions)


def test_methods_stand_in_the_order_of_the_config_and_the_first_is_the_baseline(tmp_path):
    shown = compare(study(tmp_path / "s", "fedprox", "fedavg", "ditto"))
    assert shown.names == ["fedprox", "fedavg", "ditto"]
    assert cells(shown, "Difference").keys() == {"Difference to fedprox (points)"}


def test_methods_that_overrides_gave_other_names_stay_in_that_order(tmp_path):
    study(tmp_path / "s", "fedprox", "fedavg", "ditto")
    for path in (tmp_path / "s").rglob("*/config.toml"):
        text = path.read_text()
        path.write_text(text.replace('name = "fedprox"', 'name = "fedprox (peft=ia3)"'))
    shown = compare(read_study(tmp_path / "s"))
    assert shown.names == ["fedprox (peft=ia3)", "fedavg", "ditto"]


def test_methods_that_the_command_run_has_run_stand_in_the_order_of_its_config(tmp_path):
    names = ("fedprox", "fedavg", "ditto")
    note_methods(tmp_path, {name: {"algorithm": {"name": name}} for name in names})
    for name in sorted(names):
        write_run(tmp_path / name, {"name": f"the {name}", "algorithm.name": name}, rows(name))
    assert compare(read_study(tmp_path)).names == [f"the {name}" for name in names]


def test_a_comparison_of_unlike_models_is_warned_of(tmp_path):
    shown = compare(study(tmp_path / "s", "fedavg", "local"))
    assert cells(shown, "Final") == {
        "Final test accuracy of the global model (%)": ["60.0 ± 2.0", "-"],
        "Final test accuracy of personal models (%)": ["-", "40.0 ± 2.0"],
    }
    (warning,) = [text for text in shown.warnings if "unlike" in text]
    assert "personal models for local" in warning
    assert "global model for fedavg" in warning


def test_a_metric_that_is_asked_for_is_compared_as_it_is(tmp_path):
    found = study(tmp_path / "s", "fedavg", "ditto")
    shown = compare(found, Options(metric="test_accuracy"))
    assert cells(shown, "Difference") == {"Difference to fedavg (points)": ["baseline", "−20.0"]}
    assert any("unlike" in text for text in shown.warnings)
    best = {c.title: c.best for c in shown.columns if c.title.startswith("Final")}
    assert best["Final test accuracy of personal models (%)"] == set()


def test_personal_models_alone_are_named_too(tmp_path):
    shown = compare(study(tmp_path / "s", "ditto"))
    assert cells(shown, "Final") == {
        "Final test accuracy of the global model (%)": ["55.0 ± 2.0"],
        "Final test accuracy of personal models (%)": ["40.0 ± 2.0"],
    }
    assert "accuracy of personal models of ditto: 40.0 %" in shown.lead


def test_global_models_alone_keep_their_heading(tmp_path):
    shown = compare(study(tmp_path / "s", "fedavg"))
    assert cells(shown, "Final") == {"Final test accuracy (%)": ["60.0 ± 2.0"]}
    assert "Test scores are of the global model, on the common test set." in shown.captions


def test_single_runs_are_shown_and_ranked_likewise(tmp_path):
    runs = [
        load_run(write_run(tmp_path / name, {"name": name, "algorithm.name": name}, rows(name)))
        for name in ("fedavg", "ditto")
    ]
    shown = compare(make_study(runs))
    assert cells(shown, "Final") == {
        "Final accuracy of the global model (%)": ["60.0", "55.0"],
        "Final accuracy of personal models (%)": ["-", "40.0"],
    }
    assert shown.finals == ["fedavg 60.0 %", "ditto 55.0 %"]
    assert shown.judged.what == "final test accuracy of the global model"
    assert [group.mean for group in shown.judged.ranking.groups] == [0.6, 0.55]


@pytest.mark.parametrize(("other", "kind"), [("ditto", "personal"), ("fedavg", "global")])
def test_only_the_score_that_is_compared_is_bold(tmp_path, other, kind):
    """Its personal models make `a` better than another Ditto, and its global one than FedAvg."""
    size, own = {"test_examples": 4000}, {"test_count": 40, "test_accuracy_std": 0.01}
    scores = {
        "a": own | {"test_accuracy": 0.9, "global_test_accuracy": 0.3},
        "ditto": own | {"test_accuracy": 0.6, "global_test_accuracy": 0.8},
        "fedavg": {"test_accuracy": 0.1},
    }
    runs = []
    for name in ("a", other):
        rows = [{"round": 1, **size, **scores[name]}]
        config = {"name": name, "algorithm.name": name}  # equal configs are not compared
        runs.append(load_run(write_run(tmp_path / name, config, rows)))
    best = {c.title: c.best for c in compare(make_study(runs)).columns if "Final" in c.title}
    titles = {f"Final accuracy {of} (%)": one for one, of in MODELS.items()}
    assert {titles[title]: marked for title, marked in best.items() if marked} == {kind: {0}}


def test_the_page_the_files_and_the_terminal_say_it(tmp_path, capsys):
    study(tmp_path / "s", "fedavg", "ditto")
    assert main(["report", str(tmp_path / "s")]) == 0
    assert "Final test, personal" in capsys.readouterr().out
    page = (tmp_path / "s" / "report.html").read_text()
    assert "Final test accuracy of personal models" in page
    for ending in ("md", "tex"):
        assert "of personal models" in (tmp_path / "s" / f"table.{ending}").read_text()
    with (tmp_path / "s" / "table.csv").open() as file:
        table = {row["Method"]: row for row in csv.DictReader(file)}
    assert float(table["ditto"]["global_test_accuracy"]) == approx(0.55)
    assert float(table["ditto"]["personal_test_accuracy"]) == approx(0.4)
    assert table["fedavg"]["personal_test_accuracy"] == ""


def test_the_cost_of_a_target_is_that_of_the_global_models(tmp_path):
    shown = compare(study(tmp_path / "s", "fedavg", "ditto"))
    (first, *_) = targets(shown.rows, 0.5)  # 90 % of it: no personal model reaches 45 %
    assert first.columns[0].cells == ["1", "1"]
