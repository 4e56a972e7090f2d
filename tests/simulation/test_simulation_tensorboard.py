"""TensorBoard shows the fields of a row in groups."""

import pytest

from fedjax_peft.simulation.record import Record
from fedjax_peft.simulation.tensorboard import tag


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


def test_a_run_writes_grouped_tags(tmp_path):
    with Record.open(tmp_path / "run", False, {"rounds": 1}, {}) as record:
        record.rewind(None)
        record.add({"round": 0, "test_accuracy": 0.5, "bytes_up": 0, "clients": [1]})
    (path,) = (tmp_path / "run" / "tensorboard").iterdir()
    written = path.read_bytes()
    for expected in (b"test/accuracy", b"comm/bytes_up"):
        assert expected in written
    assert b"test_accuracy" not in written
