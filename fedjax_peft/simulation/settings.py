"""What a run directory says of the run's arguments: its config and its fingerprint."""

from pathlib import Path

from fedjax_peft.engine.devices.distributed import processes
from fedjax_peft.simulation.arguments import Given
from fedjax_peft.simulation.origin import origin_text
from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.storage import calls
from fedjax_peft.simulation.storage.fingerprint import check_same, check_same_run, fingerprint
from fedjax_peft.simulation.storage.record import recorded_config


def settings(given: Given) -> tuple[Row, Row]:
    """Returns the config and the fingerprint that the run directory gets.

    Raises:
      InputError: the processes of a run have other ones.
    """
    records, compared = given.records, given.out is not None or processes() > 1
    config, found = dict(records.config or {}), fingerprint(vars(given)) if compared else {}
    complete = records.config is not None and "point" not in config
    if not complete and (compared or records.trackers):
        begins = None if records.origin is None else origin_text(records.origin)
        config = {**calls.settings(given, begins), **config}
    tables = {"placement": given.placement, "evaluation": given.evaluation, "records": records}
    own = {
        table: {n: x for n, x in vars(one).items() if isinstance(x, int | str)}
        for table, one in tables.items()
    }
    check_same_run({**config, **found, "of this process": own})
    return config, found


def check_recorded(given: Given) -> None:
    """Raises InputError if the run in ``out`` is not that of these arguments of :func:`simulate`.

    Nothing is compiled or written.
    """
    directory = Path(given.out or "")
    recorded, config = recorded_config(directory), given.records.config or {}
    if "point" in config:  # the run has recorded other settings as well
        recorded = {"point": recorded.get("point")}
    check_same(directory, recorded, config, fingerprint(vars(given)))
