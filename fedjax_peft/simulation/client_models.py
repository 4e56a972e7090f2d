"""The personal models of a run's clients, which exist if some leaves are private."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from fedjax_peft.contracts import Algorithm, PyTree
from fedjax_peft.engine.stores.client_store import client_count
from fedjax_peft.models.base import Model
from fedjax_peft.numerics.roles import assign_roles
from fedjax_peft.support.errors import InputError, nearest


def check_format(format: str, *, moved: bool) -> None:
    """Raises InputError for an adapter format if the server has also changed frozen weights."""
    if moved and format != "merged":
        raise InputError(
            f"This algorithm has folded what it learned into the frozen weights, which the format"
            f" {format!r} does not hold: export with the format 'merged'."
        )


FEDERATION = "federation.json"
"""The file of a run whose clients were real (:mod:`fedjax_peft.deploy`): what these have said of
themselves."""


def is_deployed(run: Path | None) -> bool:
    """Returns whether a directory is that of a run whose clients were real."""
    return run is not None and (run / FEDERATION).is_file()


def choose_client(run: Path | None, advice: str) -> str:
    """Returns the advice on how to choose a client's model; of real clients, where it is."""
    return f"The clients of {run} were real. {_ELSEWHERE}" if is_deployed(run) else advice


def check_here(run: Path | None) -> None:
    """Raises InputError if what the clients of a run keep is with real clients."""
    if is_deployed(run):
        raise InputError(f"{run} has nothing of its clients, which were real. {_ELSEWHERE}")


_ELSEWHERE = (
    "What a client keeps is on its own machine, in the folder of its SuperNode's `state`. There,"
    " with a copy of the run's directory: fedjax-peft predict RUN --client-folder state/client-0,"
    " and likewise export."
)


def check_global(model: Model, algorithm: Algorithm, advice: str) -> None:
    """Raises InputError if some leaves are private, so that there is no trained global model.

    Args:
      advice: the end of the message, which says how to choose a client's model.
    """
    private = assign_roles(model.kinds, algorithm.roles)["private"]
    trained = sum(kind != "fixed" for kind in model.kinds.values())
    if private:
        raise InputError(
            f"In this run {len(private)} of the {trained} trained leaves are private to"
            f" the clients, such as {sorted(private)[0]!r}. The global model has only the initial"
            f" values of these, so it is not what was trained. {advice}"
        )


def check_clients(clients: Sequence[int], client_state: PyTree) -> None:
    """Raises InputError for a client that does not exist, or if the clients keep no state."""
    n = client_count(client_state)
    if not n:
        raise InputError(
            "This run keeps nothing private to its clients: they all have the global model. Leave"
            " the client out."
        )
    for client in clients:
        if not 0 <= client < n:
            raise InputError(f"There is no client {client}: the run has {n}, 0 to {n - 1}.")


def client_number(client: int | str, names: Sequence[str]) -> int:
    """Returns the number of a client that is given by its number or its name.

    Args:
      names: of all clients; empty if they have none.

    Raises:
      InputError: no client has this name.
    """
    if not isinstance(client, str):
        return client
    if client in names:
        return names.index(client)
    if not names:
        raise InputError(
            f"There is no client {client!r}: this run's clients have numbers, and no names."
        )
    raise InputError(f"There is no client {client!r}. {nearest(client, names)}")


def read_client(text: str, client_state: PyTree, names: Sequence[str]) -> int:
    """Returns the number of a client that a text names: a number of a client, or else a name."""
    number = int(text) if text.removeprefix("-").isdecimal() else None
    if number is None or (text in names and not 0 <= number < client_count(client_state)):
        number = client_number(text, names)
    check_clients([number], client_state)
    return number


def read_clients(text: str, client_state: PyTree, names: Sequence[str]) -> list[int]:
    """Returns the clients that a text such as ``all``, ``0,3,7`` or ``alice,bob`` names.

    Raises:
      InputError: a client does not exist.
    """
    if text == "all":
        return list(range(client_count(client_state)))
    return sorted({read_client(word.strip(), client_state, names) for word in text.split(",")})


def untrained_note(clients: Iterable[int], seen: Collection[int]) -> str | None:
    """Returns a sentence about the clients that never trained, or None if there are none."""
    never = [client for client in clients if client not in seen]
    if not never:
        return None
    shown = ", ".join(map(str, never[:8])) + (f" and {len(never) - 8} more" if never[8:] else "")
    one = len(never) == 1
    return (
        f"{'client' if one else 'clients'} {shown} never trained in this run:"
        f" what {'it keeps' if one else 'they keep'} private still has its initial values."
    )
