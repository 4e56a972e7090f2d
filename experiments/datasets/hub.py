"""Writes what the Hugging Face hub has of the named data sets, and when it was last read.

    python experiments/datasets/hub.py               # all that are on the hub: some minutes
    python experiments/datasets/hub.py squad mrqa    # these alone
    python experiments/datasets/hub.py --files DIR   # reads the files in DIR/NAME instead
    python experiments/datasets/hub.py --check       # whether the list and the page agree

The first rows of every split are streamed, so that little is downloaded. ``hub.json`` keeps for
each data set the commit, the splits, and the columns with their types and classes. The table in
``docs/reference/data.md`` is made from it. A data set that cannot be read keeps what is known of
it, and its date. The tests of ``tests/data/test_data_hub.py`` load made-up rows in these columns:
run them after a change.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from fedjax_peft.data.catalog import DATASETS, Source
from fedjax_peft.data.formats import tabular
from fedjax_peft.data.reading import Reading
from fedjax_peft.tasks.sources import load_tables

LIST = Path(__file__).with_name("hub.json")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "data.md"
MARKS = ("<!-- hub: begin -->\n", "<!-- hub: end -->\n")
UNREAD = {"read": None, "commit": None, "splits": {}, "features": {}, "files": None}
HEAD = (
    "| data set | repository | splits | columns | read from the hub | read from files |\n"
    "|---|---|---|---|---|---|\n"
)
_ROWS = 3


def from_hub(entry: Source) -> dict[str, Any]:
    """Returns what the hub has of a data set now."""
    import datasets
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(entry.hub or "", revision=entry.revision)
    if info.id != entry.hub:
        print(f"  {entry.hub} is called {info.id} now: change the catalogue.")
    revision = {} if entry.revision is None else {"revision": entry.revision}
    streams = tabular.load(entry.hub, entry.config, streaming=True, **revision)
    splits, features = {}, {}
    for split, stream in streams.items():
        rows = list(stream.take(_ROWS))
        counts = (stream.info.splits or {}).get(split)
        splits[split] = getattr(counts, "num_examples", None) or None
        found = stream.features or datasets.Dataset.from_list(rows).features
        features = features or found.to_dict()
    return {"read": f"{date.today()}", "commit": info.sha, "splits": splits, "features": features}


def from_files(name: str, folder: Path) -> dict[str, Any]:
    """Returns the rows of the files of a data set, as the library reads and splits them."""
    _, tables = load_tables(name, Reading(source=str(folder)))
    rows = {split: len(table) for split, table in tables.items()}
    return {"files": {"read": f"{date.today()}", "rows": rows}}


def table(known: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table of the page."""
    return HEAD + "".join(_line(name, DATASETS[name], known[name]) for name in DATASETS)


def _line(name: str, entry: Source, record: Mapping[str, Any]) -> str:
    where = f"`{entry.hub}`" if entry.hub else "not on the hub"
    where += "".join(f", `{x}`" for x in (entry.config, entry.revision) if x)
    where = ", ".join(f"`{part}`" for part in entry.parts) or where
    columns = (f"`{column}`{_classes(kind)}" for column, kind in record["features"].items())
    cells = [f"`{name}`", where, _counts(record["splits"]) or "–", ", ".join(columns) or "–"]
    cells += [_of_hub(entry, record), _of_files(record["files"])]
    return f"| {' | '.join(cells)} |\n"


def _counts(splits: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} {n:,}" if n else name for name, n in splits.items())


def _classes(kind: Any) -> str:
    inner = kind.get("feature", kind)
    return f" ({len(inner['names'])} classes)" if inner.get("_type") == "ClassLabel" else ""


def _of_hub(entry: Source, record: Mapping[str, Any]) -> str:
    if entry.hub is None:
        return "–"
    return f"{record['read']}, `{record['commit'][:7]}`" if record["read"] else "never"


def _of_files(files: Mapping[str, Any] | None) -> str:
    return f"{files['read']}: {_counts(files['rows'])}" if files else "–"


def load() -> dict[str, dict[str, Any]]:
    """Returns the list, with a place for every data set of the catalogue."""
    known = json.loads(LIST.read_text())
    return {name: UNREAD | known.get(name, {}) for name in DATASETS}


def write(known: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the list, a line for each of its fields, and the table of the page."""
    records = (
        f' "{name}": {{\n'
        + ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in record.items())
        + "\n }"
        for name, record in known.items()
    )
    LIST.write_text("{\n" + ",\n".join(records) + "\n}\n")
    before, _, after = _parts()
    PAGE.write_text(before + MARKS[0] + table(known) + MARKS[1] + after)


def _parts() -> tuple[str, str, str]:
    """Returns the page before its table, the table, and what is after it."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    inside, _, after = rest.partition(MARKS[1])
    return before, inside, after


def check() -> None:
    """Raises SystemExit if the list has other data sets than the catalogue, or the page lags."""
    if json.loads(LIST.read_text()).keys() != DATASETS.keys() or _parts()[1] != table(load()):
        raise SystemExit("The catalogue, hub.json and the page differ: run hub.py --files FOLDER.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the data sets of the command line, one after the other, and keeps each at once."""
    from huggingface_hub.errors import HfHubHTTPError

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="data sets (default: all)")
    parser.add_argument("--files", type=Path, metavar="DIR", help="read the files in DIR/NAME")
    parser.add_argument("--check", action="store_true", help="only compare the list and the page")
    given = parser.parse_args(arguments)
    if given.check:
        return check()
    if unknown := {*given.names} - DATASETS.keys():
        parser.error(f"there is no data set {min(unknown)!r}")
    known, failed = load(), []
    for name in given.names or DATASETS:
        entry, folder = DATASETS[name], given.files and given.files / name
        if not (folder.is_dir() if folder else entry.hub):
            continue
        print(name, flush=True)
        try:
            known[name] |= from_files(name, folder) if folder else from_hub(entry)
        except Exception as error:  # many kinds, of the hub, the network, and damaged files
            if not folder and not isinstance(error, HfHubHTTPError) and not _answers():
                why = tabular.cause(error)
                raise SystemExit(f"The Hugging Face hub cannot be reached ({why}).") from None
            failed.append(name)
            print(f"  could not be read: {tabular.cause(error)}")
        else:
            write(known)
    if not failed:
        return write(known)
    raise SystemExit(f"Not read, and left as they were: {', '.join(failed)}.")


def _answers() -> bool:
    """Returns whether the hub can be reached."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info("nyu-mll/glue")
    except Exception:  # of any kind: offline, a proxy, a name that cannot be looked up
        return False
    return True


if __name__ == "__main__":
    main()
