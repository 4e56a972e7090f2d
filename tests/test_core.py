"""The core works alone: without what data, checkpoints, runs on disk and reports need."""

import subprocess
import sys
from pathlib import Path

import core_alone


def test_the_core_trains_a_hand_written_model_without_the_shell():
    """First the rooms without Flax, by the engine's session; then PEFT methods and fp.session."""
    script = Path(core_alone.__file__)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trained = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    assert float(trained["engine"]) < 0.2
    assert trained["session"] == trained["engine"], "the same program"
