"""Edited or damaged run directories: reports and checkpoints are read or raise InputError."""

import io
import json
import shutil

import pytest
from fuzzing import EXAMPLES, VALUES, damaged, damaged_json, dumped, fuzz, refused_or_fine
from hypothesis import given
from hypothesis import strategies as st
from internals import config as configs
from internals import loading, read_study, record
from internals import page as report
from rich.console import Console

from fedjax_peft import testing
from fedjax_peft.report.comparison import Options, compare

pytestmark = pytest.mark.slow

ROW = {
    "round": 0,
    "headline": "accuracy",
    "headline_better": "higher",
    "train_loss": 1.5,
    "test_accuracy": 0.5,
    "client_accuracy_mean": 0.4,
    "client_accuracy_worst": 0.1,
    "clients": [0, 2],
    "dropped": [],
    "late": [1],
    "bytes_up": 1000,
    "bytes_down": 2000,
    "simulated_seconds": 1.5,
    "aggregation_error_relative": 0.1,
    "slot_utilisation": 0.9,
    "update_norm": 0.1,
    "lanes": 2,
    "time": {"train_s": 1.0, "eval_s": 0.5},
    "roles": {"shared": 10, "private": 0, "fixed": 0},
    "parameters": {"adapter": 10, "head": 2, "frozen": 100},
    "skipped_leaves": ["a"],
    "layers": {"error": {"a": 0.1}},
}
ROWS = [{**ROW, "round": i} for i in range(4)]
CONFIG = {"name": "a run", "rounds": 3, "seed": 0, "data": {"name": "x"}}
ENVIRONMENT = {"python": "3.11", "versions": {"jax": "0.10"}, "device": "cpu"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def lines(rows):
    return b"".join(dumped(row) + b"\n" for row in rows)


def show(place, *, page=False, **files):
    """Shows a run of these files, and with ``page`` its figures too."""
    folder = place / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    record.write_config(folder / "config.toml", CONFIG)
    (folder / "metrics.jsonl").write_bytes(lines(ROWS))
    (folder / "environment.json").write_bytes(dumped(ENVIRONMENT))
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    with refused_or_fine():
        study = read_study(folder, folder, unfinished=True)
        runs = study.records
        text = io.StringIO()
        console = Console(file=text, width=100, color_system=None)
        console.print(*compare(study).terminal_tables(100))
        methods = compare(study, Options(detect=0.01))
        console.print(*methods.terminal_tables(100), methods.lead, *methods.warnings, markup=False)
        assert "\x1b" not in methods.files()["table"].markdown()
        assert "\x1b" not in text.getvalue()
        if page:
            assert "\x1b" not in report.render_report(study)
            if EXAMPLES:  # with all files of all figures
                report.write_report(runs, place / "page")


@fuzz(60)
@given(data=st.data())
def test_hostile_metrics(place, data):
    rows = data.draw(damaged_json(ROWS))
    show(place, metrics_jsonl=lines(rows if isinstance(rows, list) else [rows]))


@fuzz(40)
@given(content=damaged(lines(ROWS)))
def test_damaged_metrics(place, content):
    show(place, metrics_jsonl=content)


@fuzz(40)
@given(content=damaged_json(ENVIRONMENT))
def test_hostile_environment(place, content):
    show(place, environment_json=dumped(content))


@fuzz(2)
@given(data=st.data())
def test_hostile_pages(place, data):
    rows = data.draw(damaged_json(ROWS))
    files = {"metrics_jsonl": lines(rows if isinstance(rows, list) else [rows])}
    files["environment_json"] = dumped(data.draw(damaged_json(ENVIRONMENT)))
    name = data.draw(st.sampled_from([v for v in VALUES if isinstance(v, str) and v.isascii()]))
    files["config_toml"] = f"name = {json.dumps(name)}\n".encode()
    show(place, page=True, **files)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run whose parameters are the initial ones."""
    root = tmp_path_factory.mktemp("finished")
    testing.write_tiny_checkpoint(root / "model")
    text = f"""
        rounds = 1
        model = {{name = "{root}/model", head = "classification"}}
        data = {{name = "{root}/data", max_length = 8}}
        partition = {{name = "iid", clients = 2}}
        peft.rank = 1
        optimizer = {{name = "sgd", learning_rate = 0.1}}
    """
    (root / "config.toml").write_text(text)
    made = record.Record(root)
    model = configs.build_model(configs.resolve(configs.load(root / "config.toml")), "abc")
    made.save_params(model.trainable, model.labels)
    loading.load_trained(root)
    return root


@fuzz(10)
@given(data=st.data(), name=st.sampled_from(["config.toml", "params.safetensors"]))
def test_a_damaged_run_is_not_predicted_with(finished, place, data, name):
    folder = place / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(finished, folder)
    (folder / name).write_bytes(data.draw(damaged((finished / name).read_bytes())))
    with refused_or_fine():
        loading.load_trained(folder)
