"""``experiments/hours.py``: the hours in the heads of the papers' configs, and their table."""

import runpy
from pathlib import Path

import pytest
import tomli_w
from small_config import small

import fedjax_peft as fp
from fedjax_peft import testing

FOLDER = Path(__file__).parents[1] / "experiments"
SCRIPT = runpy.run_path(str(FOLDER / "hours.py"))
CONFIG = small(batch_size=2, data={"name": "mine/texts", "max_length": 16, "test_examples": 8})
SHAPE = {key: value for key, value in testing.TINY_LLAMA.items() if value is not None}
CONFIG["model"] = {"name": "tiny", "head": "causal_lm", "config": SHAPE}
CONFIG |= {"local_steps": 3, "partition": {"name": "iid", "clients": 5}}


LIST = """
[mine]
title = "Mine"
[[mine.results]]
names = ["Table 1", "Figure 2"]
what = "nothing"
paper = ["one"]
write = "tables.py"
files = []
"""


def test_the_heads_and_the_tables_agree():
    SCRIPT["check"]()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns a folder of one paper with one config, as the script sees it."""
    place = tmp_path / "mine" / "paper"
    place.mkdir(parents=True)
    text = "# A title.\n#\n#   a command\n" + tomli_w.dumps(CONFIG)
    (place / "one.toml").write_bytes(text.replace("\n[", "  # no\n\n[", 1).encode())
    (tmp_path / "reproduce.toml").write_text(LIST)
    for name in ("README.md", "papers.md"):
        (tmp_path / name).write_text("before\n" + "".join(SCRIPT["MARKS"]) + "after\n")
    monkeypatch.setitem(SCRIPT["main"].__globals__, "FOLDER", tmp_path)
    return tmp_path


def test_a_head_is_written_once_and_the_rest_is_kept(folder):
    path = folder / "mine" / "paper" / "one.toml"
    before = path.read_bytes().decode()
    SCRIPT["main"]([])
    once = path.read_bytes().decode()
    line = once.splitlines()[3]
    assert once.replace(line + "\n", "") == before
    assert line.startswith("# Hours of 1 run: ")
    assert line.endswith("; steps of the config; with evaluation (experiments/hours.py).")
    SCRIPT["main"]([str(path)])
    assert path.read_bytes().decode() == once
    readme = (folder / "README.md").read_text()
    assert "| [mine/paper/one.toml](mine/paper/one.toml) | 1 | " in readme
    hours = line.partition(": ")[2].partition(" on an H100")[0]
    row = f"| `mine 1` | Table 1, Figure 2 | nothing | {hours} | - | paper: `one` |\n"
    assert row in (folder / "papers.md").read_text()
    assert readme.startswith("before\n")
    assert readme.endswith("after\n")
    SCRIPT["check"]()


def test_a_head_that_is_not_computed_yet_is_refused(folder):
    """Also where the table says so."""
    SCRIPT["main"]([])
    path = folder / "mine" / "paper" / "one.toml"
    path.write_text(path.read_text().replace("# Hours", "# Days"))
    SCRIPT["main"](["--tables"])
    assert SCRIPT["NOT_YET"] in (folder / "README.md").read_text()
    with pytest.raises(fp.InputError, match=r"one\.toml does not have the hours of its 1 runs"):
        SCRIPT["check"]()


@pytest.mark.parametrize(("old", "new"), [("of 1 run", "of 2 runs"), ("# Hours", "# Days")])
def test_heads_that_do_not_agree_with_the_table_are_refused(folder, old, new):
    SCRIPT["main"]([])
    path = folder / "mine" / "paper" / "one.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(fp.InputError, match="is not that of"):
        SCRIPT["check"]()


def test_a_table_of_commands_that_is_not_the_lists_is_refused_and_renewed(folder):
    SCRIPT["main"]([])
    (folder / "reproduce.toml").write_text(LIST.replace("nothing", "more"))
    with pytest.raises(fp.InputError, match=r"papers\.md is not that of"):
        SCRIPT["check"]()
    SCRIPT["main"](["--tables"])
    SCRIPT["check"]()
    assert "| more |" in (folder / "papers.md").read_text()


def test_a_config_with_more_runs_than_its_head_is_refused(folder):
    SCRIPT["main"]([])
    path = folder / "mine" / "paper" / "one.toml"
    path.write_text(path.read_text() + "\n[sweep.grid]\nseed = [0, 1]\n")
    with pytest.raises(fp.InputError, match="its 2 runs"):
        SCRIPT["check"]()
