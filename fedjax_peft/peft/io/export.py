"""Exports of trained models: for Hugging Face PEFT, for AdapterHub, or merged for transformers.

An export has the model's tokenizer and a model card. It appears completely or not at all: it is
written beside its target and then renamed.
Another export is replaced only on request.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from fedjax_peft.contracts import Params
from fedjax_peft.models.base import Model
from fedjax_peft.models.checkpoint import save_checkpoint
from fedjax_peft.models.registry import FAMILIES, Dtype, class_name
from fedjax_peft.peft.base import merge
from fedjax_peft.peft.io.describe import card
from fedjax_peft.peft.io.files import FORMATS, Format
from fedjax_peft.peft.io.hfpeft import write_peft
from fedjax_peft.peft.io.layouts import LAYOUTS
from fedjax_peft.support.errors import InputError, check_known, nearest
from fedjax_peft.support.files import replace_file

_HOLDS: dict[str, tuple[str, ...]] = {
    "peft": (
        *("lora", "dora", "ia3", "prompt_tuning", "lora_sb", "lora_sum", "lora_xs", "ravan"),
        *("slora", *LAYOUTS),
    ),
    "adapterhub": ("houlsby", "pfeiffer", "bottleneck"),
    "merged": (
        *("lora", "dora", "lora_sb", "lora_sum", "lora_with_base", "lora_xs", "ravan", "slora"),
        *("ia3", "bitfit", "layer_norm", "full", "head_only", *LAYOUTS),
    ),
}
"""Format -> the methods that it can hold."""


def formats(method: str) -> list[Format]:
    """Returns the formats that can hold a PEFT method."""
    return [format for format in FORMATS if method in _HOLDS[format]]


def export(
    model: Model,
    params: Params,
    directory: str | Path,
    *,
    format: Format = "peft",
    base_model: str | None = None,
    overwrite: bool = False,
    run: Path | None = None,
    dtype: Dtype = "float32",
    finish: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Writes the trained leaves, the head included; returns the directory.

    Args:
      model: the model that was trained; its ``trainable`` holds the initial values.
      directory: new, empty, or with an export of exactly the same content.
      base_model: recorded as an adapter's base model; by default where the model came from.
      overwrite: also replace an export of other content in the directory, if it has the same file
        names.
      run: the directory of the run that trained the leaves, which a run that starts from the export
        then knows (``run_of``).
      dtype: the dtype of the weights of a merged model. ``bfloat16`` halves the file, and rounds.
      finish: called with the complete folder before it appears, to add files to it.

    Raises:
      InputError: the format cannot hold the method, the model is of no Hugging Face family, the
        leaves are those of another model, or the directory holds anything else.
    """
    with _staged(directory, format, overwrite) as scratch:
        _writer(model, format, base_model, dtype)(params, scratch)
        _note(scratch, Path(directory), run)
        finish(scratch)
    return Path(directory)


def export_clients(
    model: Model,
    clients: Iterable[tuple[int, Params]],
    directory: str | Path,
    *,
    format: Format = "peft",
    base_model: str | None = None,
    overwrite: bool = False,
    run: Path | None = None,
    dtype: Dtype = "float32",
) -> Path:
    """Writes an export for each client, ``client_0000`` and so on; returns the directory.

    The other arguments are those of :func:`export`.

    Args:
      clients: number and trained leaves of each client.
    """
    with _staged(directory, format, overwrite) as scratch:
        write = _writer(model, format, base_model, dtype)
        for client, params in clients:
            own = client_directory(scratch, client)
            own.mkdir()
            write(params, own)
            _note(own, client_directory(Path(directory), client), run)
    return Path(directory)


def run_of(directory: Path) -> Path | None:
    """Returns the directory of the run whose leaves a directory holds, if an export says it."""
    path = directory / _RUN
    if not path.is_file():
        return None
    return (directory / path.read_text(encoding="utf-8").strip()).resolve()


_RUN = "trained_by.txt"


def _note(written: Path, directory: Path, run: Path | None) -> None:
    """Writes where the run is, relative to where the export will be."""
    if run is not None:
        place = os.path.relpath(run.resolve(), directory.resolve())
        replace_file(written / _RUN, f"{place}\n".encode())


def client_directory(directory: Path, client: int) -> Path:
    """Returns where :func:`export_clients` writes the export of a client."""
    return directory / f"client_{client:04d}"


def _writer(
    model: Model, format: Format, base_model: str | None, dtype: Dtype
) -> Callable[[Params, Path], None]:
    """Returns the function that writes trained leaves into an empty directory."""
    check_known("dtype", dtype, get_args(Dtype))
    if dtype != "float32" and format != "merged":
        raise InputError(
            f"dtype = {dtype!r} is for the format 'merged': an adapter is small, and stays float32."
        )
    _check_model(model, format)
    architecture = class_name(model)

    def write(params: Params, directory: Path) -> None:
        _check_params(model, params)
        if format == "peft":
            write_peft(model, params, directory, architecture=architecture, base_model=base_model)
        elif format == "adapterhub":
            from fedjax_peft.peft.io.adapterhub import export_adapterhub

            export_adapterhub(model, params, directory, base_model=base_model)
        else:
            plain = merge(model, params)
            values = {**plain.frozen, **plain.trainable}
            save_checkpoint(
                *(values, model.config, directory, model.labels),
                architecture=architecture,
                dtype=dtype,
            )
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(str(directory))
        replace_file(directory / "README.md", card(model, format, base_model).encode())

    return write


def _check_model(model: Model, format: Format) -> None:
    if model.config.get("model_type") not in FAMILIES:
        raise InputError(
            "An export needs the module names of a Hugging Face model, and this model's family is"
            f" not among them ({', '.join(FAMILIES)})."
        )
    if model.method is None:
        if format != "merged":
            raise InputError(
                "The model has no method attached, so there is no adapter to export in the format"
                f" {format!r}. Use 'merged'."
            )
        return
    name = model.method.name
    if name not in _HOLDS[format]:
        others = formats(name)
        advice = f"Use {' or '.join(map(repr, others))}." if others else "No other format can."
        raise InputError(
            f"The format {format!r} cannot hold {name!r}; it is for {', '.join(_HOLDS[format])}."
            f" {advice}"
        )


def _check_params(model: Model, params: Params) -> None:
    wanted, given = ({n: x.shape for n, x in tree.items()} for tree in (model.trainable, params))
    if strange := sorted(n for n in wanted | given if wanted.get(n) != given.get(n)):
        raise InputError(
            f"These parameters are not this model's: {strange[0]!r} is"
            f" {given.get(strange[0], 'missing')} here and {wanted.get(strange[0], 'missing')} in"
            f" the model ({len(strange)} such leaves in all)."
        )


# --------------------------------------------------------------------------- complete or not at all


@contextmanager
def _staged(directory: str | Path, format: str, overwrite: bool) -> Iterator[Path]:
    """Yields an empty directory that becomes ``directory`` if the block succeeds."""
    if format not in FORMATS:
        raise InputError(f"The export format {format!r} is unknown. {nearest(format, FORMATS)}")
    target = Path(directory).resolve()
    if target.exists() and not target.is_dir():
        raise InputError(f"{directory} is a file: an export is a directory.")
    # In the first parent directory that exists: the same file system, and no directory to remove.
    beside = next(p for p in target.parents if p.is_dir())
    scratch = beside / f".{target.name}.{os.getpid()}.tmp"
    try:
        scratch.mkdir()
        yield scratch
        for path in scratch.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, scratch, overwrite)
    except OSError as error:
        raise InputError(f"The export cannot be written to {directory}: {error}.") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _replace(target: Path, scratch: Path, overwrite: bool) -> None:
    """Renames ``scratch`` to ``target``, which may only hold files of the same names.

    Without ``overwrite`` the files must have the same content too.
    """
    if not target.exists():
        os.replace(scratch, target)
        return
    new = {path.name for path in scratch.iterdir()}
    there = {path.name for path in target.iterdir()}
    if strange := sorted(there - new):
        raise InputError(
            f"{target} holds {strange[0]!r}, which this export would not replace"
            f" ({len(strange)} such files in all): choose another directory, or empty that one."
        )
    if there and not overwrite and _contents(target) != _contents(scratch):
        raise InputError(
            f"{target} already holds another export. Choose another directory, or replace that"
            " export with --overwrite (in Python: overwrite=True)."
        )
    old = scratch.with_suffix(".old")
    os.replace(target, old)
    try:
        os.replace(scratch, target)
    except BaseException:
        os.replace(old, target)
        raise
    shutil.rmtree(old)


def _contents(directory: Path) -> dict[Path, str]:
    """Returns a hash of every file in a directory, by its relative path."""
    found = {}
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                found[path.relative_to(directory)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
