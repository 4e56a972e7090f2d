"""What the benchmarks share: turns, ratios, processes and tables."""

import functools
import itertools
import json

import accelerators
import device_day
import harness
import opponents
import pytest
from closeness import approx


def test_programs_run_in_turns_after_a_warm_up():
    order, clock = [], itertools.count()

    def program(name):
        def run():
            order.append(name)
            return next(clock)

        return run

    found = harness.turns({name: program(name) for name in "ab"}, repeats=2, warm=1)
    assert "".join(order) == "abbaab", "each turn begins with another program"
    assert found == {"a": [3, 4], "b": [2, 5]}
    assert harness.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == approx(2.0)


def test_a_process_says_its_last_line_or_why_it_failed():
    code = "import json, os, sys; print('note'); print(json.dumps(os.environ['A'] + sys.argv[1]))"
    assert harness.ask("-c", code, 1, A="x") == "x1"
    failing = "raise ValueError('no memory')"
    assert harness.ask("-c", failing) == "ValueError: no memory"
    with pytest.raises(SystemExit, match="no memory"):
        harness.ask("-c", failing, check=True)
    assert harness.ask("-c", "import time; time.sleep(9)", limit=0.01) == "stopped after 0 s"


def test_results_have_the_machine_and_a_table_beside_them(tmp_path, capsys):
    a = harness.arguments("Doc.", per_round=3).parse_args(["--per-round", "4"])
    harness.print_json(a, ("numpy",), seconds=[1.0])
    found = json.loads(capsys.readouterr().out)
    assert (found["arguments"], found["seconds"]) == ({"per_round": 4}, [1.0])
    assert {"device", "processor", "cores", "load_average", "jax", "numpy"} <= found[
        "machine"
    ].keys()
    table = harness.markdown(["a", "b"], [[1, "x"]])
    assert table == "| a | b |\n|---|---|\n| 1 | x |\n"
    harness.write(tmp_path / "found.json", {"a": 1}, table)
    assert harness.known(tmp_path / "found.json") == {"a": 1}
    assert (tmp_path / "found.md").read_text() == table
    assert harness.known(tmp_path / "none.json") == {}


TRIED = {
    "equality": ("FRA", "decoder"),
    "models": ("minilm",),
    "opponents": ("minilm, 8",),
    "nemo": ("nemo",),
    "attention": ("whole, causal", "tokamax, causal"),
    "papers": ("FRA, alpha 0.1",),
}
"""Part of a device day -> the items that are tried; ``lanes`` are as ``models``."""


@pytest.mark.exhaustive
@pytest.mark.long("a program of each kind is compiled")
def test_a_device_day_in_tiny_shapes(monkeypatch, tmp_path, capsys):
    """Every kind of item gives figures, or names the library that is missing; all are written."""
    rounds = functools.cache(device_day.rounds_of)
    for name in ("on_cpu", "rounds_of"):
        monkeypatch.setattr(device_day, name, rounds)
    small = device_day.ROWS.copy()
    for module in (device_day, device_day.on_device, accelerators):
        monkeypatch.setattr(module, "ROWS", small)
    shapes = []
    monkeypatch.setattr(opponents, "compare", lambda *given: (shapes.append(given[0]) or [], {}))
    for name, items in TRIED.items():
        part = device_day.PARTS[name]
        assert set(items) <= set(part.items)
        monkeypatch.setitem(device_day.PARTS, name, part._replace(items=items))

    def ask(part, item, left):
        try:
            return device_day.PARTS[part].measure(item, tmp_path, True)
        except ImportError as error:
            return str(error)

    device_day.measure(list(TRIED), 1e6, tmp_path, ask)
    found = {name: harness.known(tmp_path / f"{name}.json") for name in TRIED}
    assert all(one["equal"] for one in found["equality"].values())
    assert all(one["tokens/s"] > 0 for one in found["models"].values())
    assert found["attention"]["whole, causal"]["same bits"]
    assert found["attention"]["tokamax, causal"] == "No module named 'tokamax'"
    assert len(found["papers"]["FRA, alpha 0.1"]["accuracies"]) == 2
    assert shapes[0]["clients"] == 8


def _parts(**items):
    """Returns parts of equal shares without work."""
    return {name: device_day.Part(1 / len(items), names, None) for name, names in items.items()}


def test_a_device_day_goes_on_where_it_was_interrupted(monkeypatch, tmp_path, capsys):
    """Items are written at once, what failed is tried again, and a part leaves its time."""
    monkeypatch.setattr(device_day, "PARTS", _parts(a=("x", "y"), b=("z",)))
    asked = []

    def ask(part, item, left):
        asked.append((item, round(left)))
        if item == "z" and len(asked) < 4:
            raise KeyboardInterrupt
        return "stopped after 3 s" if item == "y" and len(asked) < 3 else {"ms": 2.5, "all": [1]}

    with pytest.raises(KeyboardInterrupt):
        device_day.measure(["a", "b"], 600, tmp_path, ask)
    assert asked == [("x", 300), ("y", 300), ("z", 600)]
    assert harness.known(tmp_path / "a.json")["y"] == "stopped after 3 s"
    assert "| y | stopped after 3 s |" in (tmp_path / "a.md").read_text()
    device_day.measure(["a", "b"], 600, tmp_path, ask)
    assert [item for item, _ in asked[3:]] == ["y", "z"]
    assert "| z | 2.5 |" in (tmp_path / "b.md").read_text(), "lists are in the JSON alone"
    device_day.measure(["a", "b"], 600, tmp_path, ask)
    assert len(asked) == 5


def test_a_device_day_ends_in_time(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(device_day, "PARTS", _parts(a=("x", "y")))
    device_day.measure(["a"], 0.0, tmp_path, lambda *_: pytest.fail("there was no time"))
    assert harness.known(tmp_path / "a.json") == dict.fromkeys("xy", "no time was left")


ROUND = """
import json, sys
for loss in {losses}:
    print(json.dumps({{"wall": {wall}, "cpu": 1.0, "loss": loss, "peak": 1.0}}), flush=True)
    sys.stdin.readline()
"""
"""A process that says what rounds took."""


def test_opponents_count_if_their_losses_are_equal(monkeypatch, tmp_path):
    """A row with other losses, or that cannot run, has a reason in place of figures."""
    codes = {
        "ours": ROUND.format(losses=[3.0, 2.0, 1.5], wall=2.0),
        "vmap": ROUND.format(losses=[3.0, 2.0005, 1.5], wall=5.0),
        "pfl": ROUND.format(losses=[3.0, 2.1, 1.5], wall=1.0),
        "flower": "import flwr_is_missing",
    }
    real = opponents.subprocess.Popen

    def start(command, **options):
        return real([command[0], "-c", codes[_row_of(command)]], **options)

    monkeypatch.setattr(opponents.subprocess, "Popen", start)
    monkeypatch.setattr(opponents.subprocess, "run", lambda *_, **__: None)
    rows, missing = opponents.compare({"dtype": "float32"}, list(codes), 2, {})
    assert [row["row"] for row in rows] == ["ours", "vmap"]
    assert rows[1]["wall_to_ours"] == approx(2.5)
    assert (rows[1]["rounds"], rows[1]["wall_s"]) == (2, 5.0)
    assert "losses differ by 0.05" in missing["pfl"]
    assert "flwr_is_missing" in missing["flower"]
    facts = {"model": "minilm", "clients": 8, "steps": 1, "dtype": "float32", "device": "cpu"}
    facts["processor"] = "x"
    file = tmp_path / "opponents.csv"
    opponents.written(file, [{**facts, **row} for row in rows])
    again = opponents.written(file, [{**facts, **rows[1], "wall_s": 9.0}])
    assert [row["wall_s"] for row in again] == ["2", "9"], "a row replaces the one with its keys"
    assert "torch.func.vmap" in opponents.table(again)


def _row_of(command):
    return "ours" if "--row" in command else command[2]


@pytest.mark.exhaustive
@pytest.mark.long("three processes import PyTorch or JAX")
def test_opponents_compute_the_same(tmp_path):
    """Ours, a loop in torch and stacked adapters have the same losses for two rounds."""
    pytest.importorskip("torch")
    shape = opponents.shape_of("minilm", 2, 1, "float32", actors=1, tiny=True)
    rows, missing = opponents.compare(shape, ["ours", "one by one", "vmap"], 1, {})
    assert not missing
    assert {row["row"] for row in rows} == {"ours", "one by one", "vmap"}
    assert max(row["loss_difference"] for row in rows) < 1e-5
