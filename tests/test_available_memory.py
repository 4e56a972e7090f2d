"""The memory that a process may still use: that of the machine, or of its container."""

import pytest
from internals import memory

GB = 2**30


@pytest.mark.parametrize(
    ("limit", "used", "cached", "free"),
    [
        (GB, GB // 4, 0, 3 * GB // 4),
        (GB, GB, GB // 2, GB // 2),  # a cache of files is given up when it is needed
        (GB, 2 * GB, 0, 0),
    ],
)
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch, limit, used, cached, free):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    assert memory.available() == free


@pytest.mark.parametrize("limit", ["max", "", None])
def test_without_a_limit_the_machine_counts(tmp_path, monkeypatch, limit):
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("1")
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    assert memory.available() > GB // 8
