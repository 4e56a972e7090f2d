"""The raw tables of a data set: from a file, a folder, the package index, the hub, or made up."""

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fedjax_peft.data.catalog import DATASETS, OWN, Source
from fedjax_peft.data.encode import encoder_of
from fedjax_peft.data.encoders.base import Encoded
from fedjax_peft.data.formats import tabular
from fedjax_peft.data.standin import tiny_tables
from fedjax_peft.data.table import Table
from fedjax_peft.support import assets
from fedjax_peft.support.errors import InputError, MissingPath, nearest

if TYPE_CHECKING:
    from fedjax_peft.data.conversations import Turns

_KNOWN = ("auto", "hub", "tiny")
_VALIDATION = ("validation", "valid", "val", "dev")
_NO_TEST = "To test on a share of the training rows, set test_share = 0.2."
Found = TypeVar("Found", Table, list[Path])


class Reading(NamedTuple):
    """How the rows of a data set are read; see :func:`fedjax_peft.load_dataset`."""

    source: str = "auto"
    seed: int = 0
    columns: Mapping[str, str] | None = None
    csv: Mapping[str, str | bool] | None = None
    test_share: float | None = None
    validation_share: float | None = None
    task: Any = None
    users: int | None = None
    user_examples: int | None = None
    label_names: Sequence[str] | None = None
    given: Mapping[str, Table] | None = None
    """Tables of the user's program by split, in the place of files."""
    turns: "Turns | None" = None
    drop_missing: bool | None = None


USUAL = Reading()


def entry_of(name: str, source: str) -> Source:
    """Returns the catalogue's entry of a data set, or :data:`OWN` for a file or folder.

    Raises:
      InputError: there is no such data set or source.
    """
    if not os.path.isdir(source) and source not in _KNOWN:
        advice = nearest(source, _KNOWN)
        raise MissingPath(f"There is no source {source!r}, which is no directory either. {advice}")
    if name in DATASETS:
        return DATASETS[name]
    if not os.path.exists(name):
        raise MissingPath(
            f"{name!r} is neither a named data set nor a file or directory (looked for in"
            f" {os.getcwd()}). {nearest(name, DATASETS)}"
        )
    if not os.path.isdir(name) and tabular.kind(Path(name)) is None:
        endings = tabular.endings_advice(Path(name))
        raise InputError(f"The file {name!r} cannot be read as data: it must end in {endings}")
    if source != "auto":
        what = "directory" if os.path.isdir(name) else "file"
        raise InputError(f"source={source!r} is for named data sets; {name!r} is a {what}.")
    return OWN


def read_tables(name: str, entry: Source, how: Reading, own: Encoded) -> dict[str, Table]:
    """Returns the raw tables: ``train``, ``test`` and perhaps ``validation``; or ``all``.

    Args:
      own: the task of the named data set, also if it is read for another one.

    Raises:
      InputError: the data cannot be reached, or a file cannot be read.
    """
    if how.given is not None:
        return _chosen(name, how.given, entry, how.test_share)
    if how.source == "tiny":
        return tiny_tables(DATASETS[name]._replace(task=own), how.seed)
    if name not in DATASETS:
        path = Path(name)
        if path.is_dir():
            return _read_folder(path, entry, how)
        return {"all": tabular.read_file(path, alone=True, form=tabular.csv_form(how.csv))}
    folder = folder_of(name, how.source)
    if folder is None and how.source == "auto" and entry.asset is not None:
        folder = assets.fetch(entry.asset)
    return _read_hub(name, entry) if folder is None else _read_folder(folder, entry, how)


def folder_of(name: str, source: str) -> Path | None:
    """Returns the user's folder of a named data set, or of its parts; None if there is none."""
    if source not in _KNOWN:
        return Path(source)
    there = (folder for folder in _folders(name) if folder.is_dir())
    return next(there, None) if source == "auto" else None


def _folders(name: str) -> list[Path]:
    """Returns the folders that may hold the files of a data set; they need not exist."""
    given = os.environ.get("FEDJAX_PEFT_DATA")
    mine = [Path(given).expanduser() / name] if given else []
    return [*mine, assets.cache_dir() / "data" / name]


def _read_folder(folder: Path, entry: Source, how: Reading) -> dict[str, Table]:
    for reader in entry.formats:
        known = inspect.signature(reader).parameters
        tables = reader(folder, **{key: x for key, x in how._asdict().items() if key in known})
        if tables is not None:
            return _chosen(folder, tables, entry, how.test_share)
    form = tabular.csv_form(how.csv)
    files = _chosen(folder, tabular.find_files(folder), entry, how.test_share)
    wholes = {split: tabular.first_part(folder, split, own) for split, own in files.items()}
    return {split: tabular.read_file(path, form=form) for split, path in wholes.items()}


def _chosen(
    folder: Path | str, found: Mapping[str, Found], entry: Source, share: float | None
) -> dict[str, Found]:
    """Returns the splits that are used, out of all tables or files that a folder has by name.

    They are ``train``, ``test`` and perhaps ``validation``; or ``all``, which is split later.
    """
    tests = dict.fromkeys((entry.test or "test", *_VALIDATION, "test"))
    test = next((name for name in tests if name in found), None)
    # A data set without a test split is split here, also if its one file is called "train".
    whole = ("all", "train") if entry.test is None or share is not None else ("all",)
    only = next((name for name in whole if name in found), None)
    if test is None and only is not None:
        return {"all": found[only]}
    if "train" not in found or test is None:
        images = " An image is a file such as train/CLASS/1.png."
        missing, hint = ("test", f" {_NO_TEST}") if "train" in found else ("train", images)
        files = Path(folder).iterdir() if os.path.isdir(folder) else ()
        raise InputError(
            f"{folder} has no file for the split {missing!r}, only for:"
            f" {', '.join(found) or 'none of these'}."
            f" A table is a file such as {missing}.jsonl; its name can end in"
            f" {tabular.endings_advice(*files)}{hint}"
        )
    validation = next((x for x in _VALIDATION if x in found and x != test), None)
    more = {} if validation is None else {"validation": found[validation]}
    return {"train": found["train"], "test": found[test], **more}


def _read_hub(name: str, entry: Source) -> dict[str, Table]:
    advice = (
        f"To have it without the hub, download {entry.download}, and put the files into"
        f" {_folders(name)[0]}, or into any folder that source= then names; source='tiny' is a"
        " stand-in to try things with."
    )
    if entry.hub is None:
        raise InputError(f"The data set {name!r} is not on the Hugging Face hub. {advice}")
    parts = {"all": "train"} if entry.test is None else {"train": "train", "test": entry.test}
    parts |= {} if entry.validation is None else {"validation": entry.validation}
    wanted = {*entry.columns, *encoder_of(entry.task).columns, *entry.keys}
    tables = {}
    for part, there in parts.items():
        try:
            revision = {} if entry.revision is None else {"revision": entry.revision}
            rows = tabular.load(entry.hub, entry.config, split=there, **revision)
        except MemoryError:
            raise
        except Exception as error:  # many kinds: offline, a proxy, no such revision, damaged
            raise InputError(
                f"The split {there!r} of {entry.hub!r} could not be loaded from the Hugging Face"
                f" hub: {tabular.cause(error)}. {advice}"
            ) from error
        rows = rows.select_columns([c for c in rows.column_names if c in wanted])
        tables[part] = tabular.from_datasets(rows, f"{entry.hub} ({there})")
    return tables
