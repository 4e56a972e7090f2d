"""What the benchmarks share: turns, ratios, processes and tables."""

import itertools
import json

import harness
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
