"""A JSON object of clients: name -> a list of rows, as FedLLM-Bench has its data sets."""

from pathlib import Path
from typing import Any

from fedjax_peft.data.formats.files import read_json
from fedjax_peft.data.table import Table
from fedjax_peft.support.errors import InputError


def read_client_lists(folder: Path) -> dict[str, Table] | None:
    """Returns the rows of a folder's one JSON file as ``all``, with the column ``client``.

    None if there is no such file, or several, or if its content is not an object of lists.

    Raises:
      InputError: a row that is not an object.
    """
    paths = sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])
    if len(paths) != 1:
        return None
    content = read_json(paths[0])
    if not isinstance(content, dict) or not all(isinstance(x, list) for x in content.values()):
        return None
    rows: list[tuple[str, Any]] = [(name, row) for name, own in content.items() for row in own]
    for number, (client, row) in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise InputError(
                f"Row {number} of {paths[0]} (of the client {client!r}) is not a JSON object."
            )
    names = dict.fromkeys(["client", *(name for _, row in rows for name in row)])
    complete = [{**row, "client": client} for client, row in rows]
    return {"all": Table(str(paths[0]), {n: [row.get(n) for row in complete] for n in names})}
