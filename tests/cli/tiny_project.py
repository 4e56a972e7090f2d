"""The config of the project that the tests of the command line share, and what they ask."""

import json

from internals import cli

CONFIG = """
rounds = 2
clients_per_round = 2
batch_size = 8
local_steps = 2
records.checkpoint_every = 1

[model]
name = "{root}/model"

[data]
name = "{root}/data"
max_length = 12

[partition]
name = "dirichlet"
clients = 6
alpha = 1.0

[peft]
rank = 2

[optimizer]
learning_rate = 3e-3
"""


def fails(capsys, *arguments: str) -> str:
    """Returns the error message of a command that must fail; it must be one paragraph."""
    assert cli.main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("fedjax-peft: ")
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1
    return captured.err


def rows(directory):
    """Returns the rows of a run without what depends on the clock."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]
