"""Trackers: what they get, that none stops or slows a run, and what a resume or ``sync`` sends."""

import copy
import csv
import itertools
import json
import math
import sys
import threading
import time
import types

import pytest
from internals import cli, read_metrics
from internals import config as configs
from refusals import refusals, refused
from running import run
from small_config import small

import fedjax_peft as fp
from fedjax_peft import InputError
from fedjax_peft.contracts.part import tagged
from fedjax_peft.simulation.storage import tracking
from fedjax_peft.simulation.storage.record import Record
from fedjax_peft.simulation.trackers.base import scalars, tag

ROWS = [
    {"round": 0, "test_accuracy": 0.25, "bytes_up": 0, "parameters": {"head": 8}},
    {"round": 1, "train_loss": 0.5, "bytes_up": 8, "clients": [1], "time": {"train_s": 0.5}},
    {"round": 2, "test_accuracy": 0.75, "bytes_up": 8, "train_loss": None, "headline": "accuracy"},
]
TAGS = {
    **{("test/accuracy", 0): 0.25, ("test/accuracy", 2): 0.75, ("train/loss", 1): 0.5},
    **{("comm/bytes_up", 0): 0.0, ("comm/bytes_up", 1): 8.0, ("comm/bytes_up", 2): 8.0},
    ("time/train_s", 1): 0.5,
}


def record(out, *trackers, rows=ROWS, resume=False, config=None, drop=None):
    """Records rows as a run does; a resumed one first drops those after the round ``drop``."""
    config = {"rounds": 2, "algorithm": "fedavg", **(config or {})}
    with Record.open(out, resume, config, {}, trackers=trackers) as opened:
        opened.rewind(drop)
        for row in rows:
            opened.add({**row})


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("test_accuracy", "test/accuracy"),
        ("global_test_macro_f1", "global_test/macro_f1"),
        ("client_accuracy_mean_unseen", "client/accuracy_mean_unseen"),
        ("train_loss", "train/loss"),
        ("bytes_up", "comm/bytes_up"),
        ("simulated_seconds", "time/simulated_seconds"),
        ("slot_utilisation", "engine/slot_utilisation"),
        ("aggregation_error", "update/aggregation_error"),
    ],
)
def test_tags(field, expected):
    assert tag(field) == expected


def test_scalars_are_the_finite_numbers_of_a_row():
    assert {(n, row["round"]): x for row in ROWS for n, x in scalars(row).items()} == TAGS


# ------------------------------------------------------------------------------------- the services


def read_csv(out):
    with (out / "metrics.csv").open(newline="") as file:
        return {(n, int(row["round"])): x for row in csv.DictReader(file) for n, x in row.items()}


def read_events(out):
    """Returns the points that TensorBoard shows, and how many the files have."""
    from tensorboardX.proto.event_pb2 import Event

    shown, written = {}, 0
    for path in sorted((out / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.HasField("session_log"):  # hides what older files have from here on
                shown = {key: x for key, x in shown.items() if key[1] < event.step}
            for value in event.summary.value:
                shown[value.tag, event.step] = value.simple_value
                written += 1
    return shown, written


def test_tensorboard_shows_all_numbers_once_also_after_a_resume(tmp_path):
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    out, board = tmp_path / "run", fp.trackers.tensorboard()
    record(out, board, rows=ROWS[:2])
    assert read_events(out) == ({key: x for key, x in TAGS.items() if key[1] < 2}, 5)
    record(out, board, rows=ROWS[1:], resume=True, drop=0)
    assert read_events(out)[0] == TAGS
    record(tmp_path / "named", fp.trackers.tensorboard(folder="board"), rows=ROWS[:1])
    assert [*(tmp_path / "named" / "board").iterdir()]


def test_csv_has_a_line_for_each_round_and_a_column_for_each_number(tmp_path):
    out, table = tmp_path / "run", fp.trackers.csv()
    record(out, table, rows=ROWS[:2])
    assert read_csv(out)["train_loss", 0] == ""
    record(out, table, rows=[{**ROWS[1], "bytes_up": 9}, ROWS[2]], resume=True, drop=0)
    found = read_csv(out)
    assert [found[name, 1] for name in ("round", "bytes_up", "time.train_s")] == ["1", "9", "0.5"]
    assert found["test_accuracy", 2] == "0.75"
    assert {index for _, index in found} == {0, 1, 2}
    record(out, table, rows=ROWS[2:], resume=True, drop=0)  # the last row once more
    assert len((out / "metrics.csv").read_text().splitlines()) == 4
    record(out, table, rows=ROWS[1:2], resume=True, drop=0)  # it went back, and ends earlier
    assert {index for _, index in read_csv(out)} == {0, 1}
    assert read_csv(out)["bytes_up", 1] == "8"
    elsewhere = tmp_path / "all.csv"
    for rows in (ROWS, ROWS[:2]):  # another run, which is shorter
        record(None, fp.trackers.csv(path=str(elsewhere)), rows=rows)
        assert len(elsewhere.read_text().splitlines()) == 1 + len(rows)
    assert elsewhere.read_text().startswith("round,test_accuracy,bytes_up,parameters.head,")


@pytest.fixture(params=["sqlite", "file"])
def mlflow(request, tmp_path, monkeypatch):
    """A tracker with a store here, and a function that returns what the store has."""
    library = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    path = tmp_path / "store"
    uri = f"sqlite:///{path}" if request.param == "sqlite" else path.as_uri()
    client = library.MlflowClient(uri)

    def stored(**tags):
        (found,) = client.search_runs(
            [client.get_experiment_by_name("mine").experiment_id],
            " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items()),
        )
        history = [
            (name, metric.step, metric.value)
            for name in found.data.metrics
            for metric in client.get_metric_history(found.info.run_id, name)
        ]
        assert len(history) == len({key[:2] for key in history})  # nothing twice
        return found, {(name, step): value for name, step, value in history}

    return fp.trackers.mlflow(experiment="mine", tracking_uri=uri), stored


@pytest.mark.long("MLflow makes its tables")
@pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")  # of MLflow's own
def test_mlflow_continues_the_same_run_and_groups_a_sweep(mlflow, tmp_path):
    tracker, stored = mlflow
    out = tmp_path / "lr" / "rate=1"
    out.parent.mkdir()
    (out.parent / "sweep.toml").touch()
    record(out, tracker, rows=ROWS[:2])
    record(out, tracker, rows=ROWS[1:], resume=True, drop=0)
    identity = json.loads((out / tracking.NAME).read_text())["id"]
    found, history = stored(**{"fedjax_peft.id": identity})
    assert history == TAGS
    assert (found.info.run_name, found.info.status) == ("rate=1", "FINISHED")
    assert found.data.params == {"rounds": "2", "algorithm": "fedavg"}
    parent, _ = stored(**{"fedjax_peft.group": "lr"})
    assert found.data.tags["mlflow.parentRunId"] == parent.info.run_id


@pytest.mark.long("MLflow makes its tables")
@pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")  # of MLflow's own
def test_mlflow_takes_names_that_it_would_refuse(mlflow, tmp_path):
    tracker, stored = mlflow
    out = tmp_path / "it's" / "rate=1"
    out.parent.mkdir()
    (out.parent / "sweep.toml").touch()
    record(out, tracker, rows=[ROWS[0] | {"test_f1@5": 0.5}], config={"my (own).py:f": 1})
    found, history = stored(**{"mlflow.runName": "rate=1"})
    assert history["test/f1_5", 0] == 0.5
    assert found.data.params["my _own_.py_f"] == "1"
    parent, _ = stored(**{"fedjax_peft.group": "it_s"})
    assert parent.info.run_name == "it's"


def read_offline(path):
    """Returns the records of a file of W&B's offline mode, in the format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record as Written

    data, found, part = path.read_bytes()[7:], [], b""
    place = 7  # in blocks of 32 KiB, with a head of 7 bytes
    while len(data) >= 7:
        if (left := 32768 - place % 32768) < 7:
            data, place = data[left:], place + left
            continue
        size, kind = int.from_bytes(data[4:6], "little"), data[6]
        part, data, place = part + data[7 : 7 + size], data[7 + size :], place + 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(Written.FromString(part))
            part = b""
    return found


@pytest.mark.long("W&B starts a process of its own")
def test_wandb_writes_offline_under_the_id_and_the_group_of_the_run(tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    out = tmp_path / "lr" / "rate=1"
    out.parent.mkdir()
    (out.parent / "sweep.toml").touch()
    tracker = fp.trackers.wandb(project="mine", mode="offline")
    record(out, tracker, rows=ROWS[:2])
    record(out, tracker, rows=ROWS[2:], resume=True, drop=1)
    identity = json.loads((out / tracking.NAME).read_text())["id"]
    files = sorted((out / "wandb").glob("offline-run-*/*.wandb"))
    shown = {}
    for records in map(read_offline, files):
        (begun,) = [one.run for one in records if one.HasField("run")]
        assert (begun.run_id, begun.project, begun.display_name) == (identity, "mine", "rate=1")
        assert begun.run_group == "lr"
        for row in (one.history for one in records if one.HasField("history")):
            cells = {c.key or "/".join(c.nested_key): json.loads(c.value_json) for c in row.item}
            shown |= {(n, row.step.num): x for n, x in cells.items() if not n.startswith("_")}
    assert shown == TAGS


def test_a_missing_package_is_named_with_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(r"needs the package wandb: pip install 'wandb", fp.trackers.wandb)


# ---------------------------------------------------------------- they neither stop nor slow a run


def test_own_functions_get_every_row_with_its_run(tmp_path):
    found = []
    record(tmp_path / "run", lambda row, run: found.append((row, run.name, run.group, run.config)))
    assert [row for row, *_ in found] == ROWS
    assert found[0][1:] == ("run", None, {"rounds": 2, "algorithm": "fedavg"})


def test_what_a_tracker_opens_is_closed_after_the_last_row(tmp_path):
    events = []

    def tracker(row, run):
        run.opened(lambda: events.append("open"), lambda _: events.append(("close", run.ended)))
        events.append(row["round"])

    record(None, tracker)
    assert events == ["open", 0, 1, 2, ("close", True)]
    del events[:]
    with pytest.raises(TypeError):
        record(None, tracker, rows=[ROWS[0], None])
    assert events == ["open", 0, ("close", False)]


def test_a_row_that_gains_fields_is_sent_with_these_alone(tmp_path):
    found = []
    with Record.open(None, False, {}, {}, trackers=[lambda row, run: found.append(row)]) as opened:
        opened.add(ROWS[1])
        opened.amend({**ROWS[1], "test_accuracy": 0.5})
    assert found == [ROWS[1], {"round": 1, "test_accuracy": 0.5}]


def test_a_tracker_that_fails_warns_once_and_its_rows_are_sent_later(tmp_path, capsys):
    out, taken, down = tmp_path / "my run", [], [True]

    def service(row, run):
        if down[0] and row["round"] == 1:
            raise ConnectionError("no route to host")
        taken.append((run.id, row["round"]))

    others = []
    with pytest.warns(UserWarning, match="takes no more") as warned:
        record(out, service, lambda row, run: others.append(row))
    (text,) = [str(one.message) for one in warned]
    assert "The tracker service takes no more rows: ConnectionError: no route to host." in text
    assert f"fedjax-peft sync '{out}'" in text
    assert others == ROWS
    assert read_metrics(out / "metrics.jsonl") == ROWS

    with pytest.raises(InputError, match=r"service does not take the rows of .*no route to host"):
        tracking.sync(out, {"rounds": 2}, [service])
    down[0] = False
    assert tracking.sync(out, {"rounds": 2}, [service]) == {"service": 2}
    assert tracking.sync(out, {"rounds": 2}, [service]) == {"service": 0}
    assert [index for _, index in taken] == [0, 1, 2]
    assert len({identity for identity, _ in taken}) == 1


class Wordless(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize("ending", [SystemExit(3), KeyboardInterrupt(), Wordless()])
@pytest.mark.parametrize("place", ["a row", "the end"])
def test_a_tracker_that_exits_is_said_like_one_that_fails(tmp_path, ending, place):
    """Python ends a thread that calls exit() without a word."""

    def stop(*_):
        raise ending

    def service(row, run):
        if row["round"] == 1 and place == "a row":
            stop()
        run.opened(dict, stop if place == "the end" else (lambda made: None))

    out, others = tmp_path / "run", []
    words = f"{type(ending).__name__}{': 3' if ending.args else ''}"
    said = rf"The tracker service takes no more rows: {words}\. The run goes on"
    with pytest.warns(UserWarning, match=said):
        record(out, service, lambda row, run: others.append(row))
    assert others == ROWS
    taken = json.loads((out / tracking.NAME).read_text())["taken"]
    assert taken["service"] == (0 if place == "a row" else 2)


def test_sync_says_that_a_tracker_exits(tmp_path):
    record(tmp_path / "run")

    def service(row, run):
        raise SystemExit(3)

    with pytest.raises(InputError, match=r"The tracker service does not take the .*SystemExit: 3"):
        tracking.sync(tmp_path / "run", {"rounds": 2}, [service])


def test_trackers_of_one_name_are_told_apart(tmp_path):
    """The second fails: it alone misses rows, and gets them later."""
    out, taken, down = tmp_path / "run", {0: [], 1: []}, [True]

    def make(index):
        def service(row, run):
            if index and down[0] and row["round"]:
                raise ConnectionError
            taken[index].append(row["round"])

        return service

    both = [make(0), make(1)]
    with pytest.warns(UserWarning, match=r"The tracker service \(2\) takes no more rows"):
        record(out, *both)
    assert json.loads((out / tracking.NAME).read_text())["taken"] == {
        "service": 2,
        "service (2)": 0,
    }
    down[0] = False
    sent = tracking.sync(out, {"rounds": 2}, both)
    assert sent == {"service": 0, "service (2)": 2}
    assert taken == {0: [0, 1, 2], 1: [0, 1, 2]}


def test_a_tracker_has_rows_and_settings_of_its_own(tmp_path):
    out, seen = tmp_path / "run", []

    def spoils(row, run):
        row.get("time", {})["train_s"] = -5
        row.get("clients", []).append(99)
        row.clear()
        run.config["nested"]["x"] = 2
        run.config.clear()

    def looks(row, run):
        seen.append((row, run.config["nested"]["x"]))

    rows, config = copy.deepcopy(ROWS), {"nested": {"x": 1}}
    with pytest.warns(UserWarning, match="tracker spoils"):  # the keys that it has removed
        record(out, spoils, looks, rows=rows, config=config)
    assert seen == [(row, 1) for row in ROWS]
    assert rows == read_metrics(out / "metrics.jsonl") == ROWS
    assert config == {"nested": {"x": 1}}
    refused("tracker spoils", tracking.sync, out, {"rounds": 2, **config}, [looks, spoils])
    assert config == {"nested": {"x": 1}}


def test_the_import_of_a_slow_library_is_no_silence(tmp_path, monkeypatch):
    (tmp_path / "slow_library.py").write_text("import time\ntime.sleep(0.8)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tracking, "PATIENCE", 0.3)
    taken = []

    def service(row, run):
        import slow_library

        taken.append((slow_library.__name__, row["round"]))

    record(tmp_path / "run", service)
    assert [index for _, index in taken] == [0, 1, 2]


def test_an_import_that_does_not_end_holds_up_no_run(tmp_path, monkeypatch):
    (tmp_path / "endless_library.py").write_text("import time\ntime.sleep(30)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tracking, "PATIENCE", 0.05)

    def service(row, run):
        import endless_library  # noqa: F401

    began = time.perf_counter()
    with pytest.warns(UserWarning, match=r"has not answered for 0\.05 s"):
        record(tmp_path / "run", service)
    assert time.perf_counter() - began < 10


ENDED = [ROWS[0], ROWS[1] | {"test_accuracy": 0.5, "stopped": "the stop rule was met"}]
"""The rows of a run that ended after round 1, and whose next test is after round 2."""


def resume_after_the_end(out, tracker):
    """Records a run that ended, and goes on: its last row has lost its scores."""
    record(out, tracker, rows=ENDED)
    with Record.open(
        out, True, {"rounds": 2, "algorithm": "fedavg"}, {}, trackers=[tracker]
    ) as opened:
        opened.rewind(1)
        opened.replace(ROWS[:2])
        opened.add({**ROWS[2]})


def test_scores_that_a_resumed_run_takes_back_are_none(tmp_path):
    seen = []
    resume_after_the_end(tmp_path / "own", lambda row, run: seen.append(row))
    lost = {**ROWS[1], "stopped": None, "test_accuracy": None}
    assert seen == [*ENDED, lost, ROWS[2]]
    assert read_metrics(tmp_path / "own" / "metrics.jsonl") == ROWS
    resume_after_the_end(tmp_path / "csv", fp.trackers.csv())
    assert read_csv(tmp_path / "csv")["test_accuracy", 1] == ""
    assert read_csv(tmp_path / "csv")["train_loss", 1] == "0.5"


def test_tensorboard_hides_scores_that_are_taken_back(tmp_path):
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    resume_after_the_end(tmp_path / "run", fp.trackers.tensorboard())
    assert read_events(tmp_path / "run")[0] == TAGS


class MadeUpMlflow:
    """The calls of MLflow's client that the tracker makes, with a store in memory."""

    def __init__(self):
        self.points, self.clock = [], itertools.count()

    def MlflowClient(self, uri):
        return self

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id="0")

    def search_runs(self, *_, **__):
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id="r"))]

    def get_run(self, _):
        names = {metric.key: 0 for metric in self.points}
        return types.SimpleNamespace(data=types.SimpleNamespace(metrics=names))

    def get_metric_history(self, _, name):
        return [metric for metric in self.points if metric.key == name]

    def Metric(self, name, value, _, step):
        return types.SimpleNamespace(key=name, value=value, step=step, timestamp=next(self.clock))

    def log_batch(self, _, metrics=()):
        self.points += metrics

    def update_run(self, *_, **__):
        pass

    set_terminated = update_run

    def shown(self):
        """Returns the last value of each point, without those that are not numbers."""
        found = {(metric.key, metric.step): metric.value for metric in self.points}
        return {key: value for key, value in found.items() if not math.isnan(value)}


def test_mlflow_loses_scores_that_are_taken_back_and_takes_others_anew(tmp_path, monkeypatch):
    store = MadeUpMlflow()
    for name in ("mlflow", "mlflow.entities"):
        monkeypatch.setitem(sys.modules, name, store)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: store)
    out, tracker = tmp_path / "run", fp.trackers.mlflow()
    resume_after_the_end(out, tracker)
    assert store.shown() == TAGS
    sent = len(store.points)
    record(out, tracker, rows=ROWS[1:], resume=True, drop=0)  # again, with the same numbers
    assert len(store.points) == sent
    other = {**ROWS[2], "test_accuracy": 1.0, "time": {"train_s": 9.0}}
    record(out, tracker, rows=[other], resume=True, drop=1)  # on another device
    expected = TAGS | {("test/accuracy", 2): 1.0, ("time/train_s", 2): 9.0}
    assert store.shown() == expected
    again = {**other, "time": {"train_s": 8.0}}
    record(out, tracker, rows=[again], resume=True, drop=1)
    assert store.shown() == expected  # the time of a repeated round is not sent
    record(out, tracker, rows=ENDED[1:], resume=True, drop=0)  # a score that was taken back
    assert store.shown() == expected | {("test/accuracy", 1): 0.5}


def test_a_resumed_run_sends_what_a_tracker_has_missed(tmp_path):
    out, taken, down = tmp_path / "run", [], [True]

    def service(row, run):
        if down[0]:
            raise ConnectionError
        taken.append(row["round"])

    with pytest.warns(UserWarning, match="takes no more rows"):
        record(out, service, rows=ROWS[:2])
    down[0] = False
    record(out, service, rows=ROWS[2:], resume=True, drop=1)
    assert taken == [0, 1, 2]


def test_a_tracker_that_hangs_holds_up_no_row_and_the_end_only_for_the_patience(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tracking, "PATIENCE", 0.05)
    release = threading.Event()
    with Record.open(
        tmp_path / "run", False, {}, {}, trackers=[lambda row, run: release.wait()]
    ) as opened:
        began = time.perf_counter()
        for index in range(100):
            opened._tracking.add({"round": index})
        assert time.perf_counter() - began < 5
        time.sleep(0.06)  # which counts
        began = time.perf_counter()
        with pytest.warns(UserWarning, match=r"It has not answered for 0\.05 s"):
            opened.close()
        assert time.perf_counter() - began < 5
    release.set()


def test_a_slow_tracker_is_waited_for_while_it_takes_rows(tmp_path, monkeypatch):
    """All rows together take longer than the patience, by a clock that only the tracker moves."""
    now, taken = [0.0], []
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(tracking, "time", clock)

    def slow(row, run):
        time.sleep(0.05)
        now[0] += tracking.PATIENCE / 4
        taken.append(row["round"])

    record(tmp_path / "run", slow, rows=[{"round": i} for i in range(5)])
    assert taken == [*range(5)]


test_what_is_no_tracker_is_refused = refusals(
    lambda given: fp.Records(trackers=[given]),
    (fp.trackers.csv, r"makes a tracker: write fp\.trackers\.csv\(\)"),
    ("wandb", r"function with the arguments \(row, run\), not str"),
)


# ----------------------------------------------------------------------- runs, configs and commands


def test_a_run_and_its_command_sync(tmp_path, capsys):
    """A run made in Python records its trackers, so that the command finds them."""
    out, seen = tmp_path / "run", []
    trackers = [fp.trackers.csv(path="numbers.csv"), lambda row, run: seen.append(row)]
    result = run(out=out, records=fp.Records(trackers=trackers))
    assert seen == result.metrics
    whole = (out / "numbers.csv").read_text()
    assert configs.load(out / "config.toml")["trackers"] == {"csv": {"path": "numbers.csv"}}
    assert cli.main(["sync", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: csv had all rows\n"
    assert cli.main(["sync", str(tmp_path), "trackers=csv"]) == 0  # into another file
    assert capsys.readouterr().out == f"{out}: csv has taken 3 rows\n"
    assert (out / "metrics.csv").read_text() == whole
    # Other trackers are no other run.
    assert run(out=out, resume=True, records=fp.Records()).metrics == result.metrics


def test_sync_of_runs_without_trackers_asks_for_one(tmp_path, capsys):
    record(tmp_path / "run")
    for words in ([], ["trackers="]):
        assert cli.main(["sync", str(tmp_path / "run"), *words]) == 2
    assert "names no tracker: add one, such as trackers=mlflow." in capsys.readouterr().err
    assert cli.main(["sync", str(tmp_path / "none")]) == 2
    assert "There is no run in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "written",
    [
        [{"name": "csv", "path": "all.csv"}, {"name": "tensorboard"}],
        {"csv": {"path": "all.csv"}, "tensorboard": {}},
        [{"name": "csv", "path": "all.csv"}, "tensorboard"],
    ],
)
def test_tables_of_a_config(written):
    config = configs.resolve(small(trackers=written))
    assert config["trackers"] == {
        "csv": {"path": "all.csv"},
        "tensorboard": {"folder": "tensorboard"},
    }
    built = [fp.call_of(one).name for one in configs.build(config, "trackers")]
    assert built == ["trackers.csv", "trackers.tensorboard"]


def test_config_of_an_own_tracker(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def count(start: int = 0):\n    def take(row, run):\n        pass\n    return take\n"
    )
    (tmp_path / "config.toml").write_text('[[trackers]]\nname = "mine.py:count"\nstart = 3\n')
    given = configs.load(tmp_path / "config.toml")["trackers"]
    config = configs.resolve(small(trackers=given))
    assert config["trackers"] == {f"{tmp_path / 'mine.py'}:count": {"start": 3}}
    assert fp.Records(trackers=configs.build(config, "trackers"))


test_bad_tables_are_refused = refusals(
    lambda written: configs.resolve(small(trackers=written)),
    (["wandbb"], "There is no tracker 'wandbb'.*wandb"),
    ([{"name": "csv", "file": "x"}], r"\[trackers.csv\] 'file'"),
    ([{"path": "x"}], r"\[trackers\] must be a table or a name"),
    (["csv", "csv"], "trackers has a name twice: csv, csv"),
)


def test_an_unreachable_server_of_mlflow_does_not_hold_up_a_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setattr(tracking, "PATIENCE", 0.3)
    began = time.perf_counter()
    with pytest.warns(UserWarning, match="The tracker mlflow takes no more rows"):
        record(tmp_path / "run", fp.trackers.mlflow(tracking_uri="http://127.0.0.1:9"))
    assert time.perf_counter() - began < 5


def test_passwords_of_trackers_in_python(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    tracker = fp.trackers.mlflow(tracking_uri="https://user:secret@host")
    tracker = tagged(lambda row, run: None, fp.call_of(tracker))
    run(out=tmp_path / "run", records=fp.Records(trackers=[tracker]))
    assert [p for p in tmp_path.rglob("*") if p.is_file() and b"secret" in p.read_bytes()] == []
    assert "***@host" in (tmp_path / "run" / "config.toml").read_text()
    assert "***@host" in (tmp_path / "run" / tracking.NAME).read_text()
