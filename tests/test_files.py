"""Files are written whole or not at all, and each error names its path."""

import os
import re
import stat

import pytest
from internals import files


def test_a_link_is_followed(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "there" / "file.txt")
    files.replace_file(link, b"new")  # a dangling one too
    files.replace_file(link, b"newer")
    assert link.is_symlink()
    assert (tmp_path / "there" / "file.txt").read_bytes() == b"newer"
    assert len(list(tmp_path.rglob("*"))) == 3


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    null = tmp_path / "null"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")
    files.replace_file(null, b"gone")
    assert stat.S_ISCHR(null.stat().st_mode)


def test_the_longest_name_is_written(tmp_path):
    path = tmp_path / ("x" * 255)
    files.replace_file(path, b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("place", ["a folder", "below a file", "no folder", "too long", "a loop"])
def test_an_impossible_place_is_named_before_and_at_the_write(place, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = {
        "a folder": tmp_path,
        "below a file": tmp_path / "file" / "x",
        "no folder": tmp_path / "none" / "x",
        "too long": tmp_path / ("x" * 300),
        "a loop": tmp_path / "loop" / "x",
    }[place]
    for write in (files.check_output, lambda path: files.replace_file(path, b"")):
        with pytest.raises(OSError, match=re.escape(path.name)) as caught:
            write(path)
        assert caught.value.filename == str(path)
        assert caught.value.strerror
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "loop"]


def test_checking_a_valid_path_creates_nothing(tmp_path):
    files.check_output(tmp_path / "new")
    files.check_output("new")
    assert not list(tmp_path.iterdir())
