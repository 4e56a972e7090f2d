"""Folders with one subfolder for each class and one file for each text; Orange's tables."""

from pathlib import Path

from fedjax_peft.data.formats.files import lines, only
from fedjax_peft.data.table import Table
from fedjax_peft.support.errors import InputError


def read_text_folders(folder: Path) -> dict[str, Table] | None:
    """Returns train and test of folders such as ``20news-bydate-train/<class>/<file>``, or None.

    Files are read as Latin-1, in which every byte is a character. The newsgroups use several
    encodings without declaring them.
    """
    tables = {}
    for split in ("train", "test"):
        own = [path for path in folder.glob(f"*{split}") if path.is_dir()]
        found = only(folder, own, "folders for one split")
        if found is not None:
            files = sorted(p for p in found.glob("*/*") if p.is_file() and p.name[0] != ".")
            texts = [path.read_bytes().decode("latin-1") for path in files]
            labels = [path.parent.name for path in files]
            tables[split] = Table(str(found), {"text": texts, "label": labels})
    return tables or None


def read_orange(folder: Path) -> dict[str, Table] | None:
    """Returns train and test of the asset's ``.tab`` files, None if they do not exist."""
    paths = {split: folder / f"20newsgroups-{split}.tab" for split in ("train", "test")}
    tables = {split: _read_tab(path) for split, path in paths.items() if path.exists()}
    return tables or None


def _read_tab(path: Path) -> Table:
    """Returns the rows of an Orange table: 3 header rows, then ``category<TAB>text``."""
    rows = []
    for number, line in lines(path):
        fields = line.split("\t")
        if number == 1 and fields != ["Category", "Text"]:
            raise InputError(f"{path} does not start with the columns Category and Text.")
        if number <= 3 or not line:  # the file has an empty line after its header
            continue
        if len(fields) != 2:
            raise InputError(f"Line {number} of {path} has {len(fields)} fields instead of 2.")
        rows.append(fields)
    return Table.of_rows(path, ("label", "text"), rows)
