"""Small stand-ins for the named data sets, made up on the spot, to try things without a download.

Their texts consist of the words ``w0`` to ``w58``, which the tokenizer of
:func:`fedjax_peft.testing.write_tiny_checkpoint` knows. A model can learn every one of them. The
encoder of the data set's task makes the rows (:class:`fedjax_peft.data.encoders.base.StandIn`).
"""

from fedjax_peft.data.catalog import Source
from fedjax_peft.data.encode import encoder_of
from fedjax_peft.data.encoders.base import StandIn
from fedjax_peft.data.table import Table
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import InputError

_CLASSES = tuple(f"class {i:02d}" for i in range(20))
"""For an entry that leaves the names to its source."""
_CLIENTS = tuple(f"client {i:02d}" for i in range(30))


def tiny_tables(entry: Source, seed: int) -> dict[str, Table]:
    """Returns ``train`` (120 rows or more) and ``test`` (40 or more) that stand in for a data set.

    If the entry has a validation split, ``validation`` (40 or more) is there too. Task, classes,
    keys and the size of images are the entry's; every class is in every split.

    Args:
      entry: the data set, with its own task.
      seed: the seed of the rows. What a model can learn from them does not depend on it.

    Raises:
      InputError: the encoder of the entry's task makes no stand-ins.
    """
    encoder = encoder_of(entry.task)
    if encoder.stand_in is None:
        raise InputError(f"The task {entry.task.name!r} has no stand-in data: leave out source.")
    names = entry.label_names or (_CLASSES if encoder.label_column == "label" else ())
    least = {"train": 120, "validation": 40, "test": 40}
    tables = {}
    for part in ("train", "test") if entry.validation is None else least:
        rng = host_rng(seed, f"tiny:{part}")
        n = max(least[part], len(names))
        wanted = StandIn(names, tuple(entry.columns.values()), entry.shape)
        columns = encoder.stand_in(rng, n, wanted)
        for key, values in entry.keys.items():
            values = values or _CLIENTS
            columns[key] = [values[i % len(values)] for i in range(n)]
        tables[part] = Table(f"the stand-in's {part}", columns, names or None)
    return tables
