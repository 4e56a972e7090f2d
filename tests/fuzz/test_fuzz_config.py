"""Configs and overrides with any content resolve or raise InputError."""

from pathlib import Path

import pytest
import tomli_w
from fuzzing import STRINGS, VALUES, damaged, damaged_json, fuzz, refused_or_fine
from hypothesis import given
from hypothesis import strategies as st
from internals import cli, config, printable, read_toml, write_config

pytestmark = pytest.mark.slow

CONFIG = {
    "rounds": 2,
    "name": "a run",
    "seed": 1,
    "clients_per_round": 2,
    "local_steps": 3,
    "system": {"client_ranks": [1, 2], "late": "drop"},
    "placement": {"lanes": 2},
    "evaluation": {"diagnostics": ["clients"], "client_holdout": 0.2},
    "model": {"name": "minilm-l6", "dropout": 0.1, "config": {"model_type": "bert"}},
    "data": {"name": "20newsgroups", "max_length": 16},
    "partition": {"name": "dirichlet", "clients": 4, "alpha": 0.5},
    "peft": {"name": "lora", "rank": 2, "targets": ["query"]},
    "algorithm": {"name": "fedprox", "mu": 0.1},
    "optimizer": {"name": "sgd", "learning_rate": 0.1},
    "time": {"preset": "federa"},
    "methods": {"one": {"rounds": 3}, "two": {"preset": "federa", "peft": {"name": "bitfit"}}},
}
TEXT = tomli_w.dumps(CONFIG).encode()
KEYS = [
    *CONFIG,
    *(f"{table}.{key}" for table, keys in CONFIG.items() if isinstance(keys, dict) for key in keys),
]


def resolve(raw, overrides=()):
    for one in config.methods(raw, overrides).values():
        resolved = config.resolve(one)
        config.build_method(resolved)
        config.build_algorithm(resolved)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("config") / "config.toml"


@fuzz(200)
@given(content=damaged(TEXT))
def test_a_damaged_config_file(path, content):
    path.write_bytes(content)
    with refused_or_fine():
        resolve(config.load(path))


@fuzz(200)
@given(raw=damaged_json(CONFIG))
def test_a_config_of_hostile_values(raw):
    with refused_or_fine():
        resolve(raw)


@fuzz(300)
@given(
    words=st.lists(
        st.tuples(st.sampled_from(KEYS) | st.sampled_from(STRINGS), st.sampled_from(VALUES)),
        min_size=1,
        max_size=3,
    )
)
def test_hostile_overrides(words):
    with refused_or_fine():
        resolve(CONFIG, [f"{key}={value}" for key, value in words])


@fuzz(20)
@given(name=st.text() | st.sampled_from(STRINGS))
def test_a_config_that_was_written_is_read_back(path, name):
    write_config(path, {"name": name, "table": {name: [name]}})
    safe = name.encode(errors="replace").decode()
    assert read_toml(path) == {"name": safe, "table": {safe: [safe]}}


@fuzz(25)
@given(
    words=st.lists(
        st.sampled_from(
            [
                *(*STRINGS, "report", "run", "predict", "export", "assets", "partition", "resume"),
                *("--out", "--input", "--output", "--only", "--json", "--target", "seed=1"),
                *("/dev/null/x", "/proc/self/mem", "/", "loop", "x" * 300, "--resume"),
            ]
        ),
        max_size=5,
    ).filter(lambda words: "\x00" not in words)
)
def test_hostile_command_lines(words, capsys, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("commands")
    (folder / "loop").symlink_to("loop")
    monkeypatch.chdir(folder)
    try:
        code = cli.main(words)
    except SystemExit as ended:  # of argparse
        code = ended.code
    assert code in (0, 2)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert printable(printed.err.replace("\n", "")) == printed.err.replace("\n", "")
    assert Path("loop").is_symlink()
