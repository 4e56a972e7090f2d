"""Flower's side: the ``ClientApp`` and the ``ServerApp`` of a deployed run.

A message of Flower holds one array of bytes (:mod:`fedjax_peft.deploy.wire`) and a small table.
Nothing else of Flower is used: no strategy, and none of its own aggregation.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.contracts import Algorithm
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.deploy.client import Client
from fedjax_peft.deploy.rounds import Lost
from fedjax_peft.deploy.server import serve
from fedjax_peft.deploy.wire import pack, table_of
from fedjax_peft.engine.compilation import use_compilation_cache
from fedjax_peft.models.base import Model
from fedjax_peft.simulation.arguments import Given
from fedjax_peft.simulation.simulate import arguments
from fedjax_peft.support.display import one_line, show
from fedjax_peft.support.errors import InputError

_BYTES, _TABLE, _POLL = "bytes", "table", 0.5
_AGAIN = 120.0
"""Seconds that a round waits for nodes that are new."""


def flower(
    model: Model | Callable[[], Model],
    algorithm: Algorithm | Callable[[], Algorithm],
    data: Callable[[Any], Dataset],
    *,
    clients: int,
    rounds: int,
    patience: float = 600.0,
    **options: Any,
) -> tuple[Any, Any]:
    """Returns the ``ClientApp`` and the ``ServerApp`` of a run whose clients are real.

    Each client is a SuperNode with ``--node-config 'client=NUMBER'``, numbered from 0, and keeps
    its state in the folder ``state=FOLDER`` of that config (by default ``fedjax_peft_state`` in its
    working directory).

    Args:
      model: as for :func:`fedjax_peft.simulate`, or a function that returns it, so that a process
        loads it when it needs it.
      algorithm: likewise.
      data: Flower's context of a client -> its training examples.
      clients: how many there are.
      rounds: communication rounds.
      patience: seconds that the server waits for clients before the first round.
      **options: of :func:`fedjax_peft.simulate`, such as ``batch_size``, ``transforms``, ``test``
        (examples of the server's own) and ``out``, which is on the server's machine. ``deadline``
        of ``system`` is in real seconds here.
    """

    def make(own: Dataset | None) -> Given:
        made = [x() if callable(x) and not isinstance(x, Model) else x for x in (model, algorithm)]
        one = nobody()
        if own is not None:
            one = Clients(own, (np.arange(len(own), dtype=np.int32),))
        return arguments(*made, one, rounds=rounds, **options)

    return client_app(lambda context: make(data(context))), server_app(
        lambda context: make(None), clients, patience
    )


def nobody() -> Clients:
    """Returns clients to begin with, for a server that does not know its clients yet."""
    return Clients(Dataset({"labels": np.zeros(1, np.int32)}, ("nothing",)), (np.zeros(1, int),))


def client_app(make: Callable[[Any], Given]) -> Any:
    """Returns a ``ClientApp``.

    Args:
      make: Flower's context -> the arguments of the run, with the examples of this client alone.
    """
    flwr = _flwr()
    app = flwr.clientapp.ClientApp()

    def answer(message: Any, context: Any, act: Callable[[Client, Any], bytes]) -> Any:
        try:
            number = _number(context)
            folder = Path(str(context.node_config.get("state", "fedjax_peft_state")))
            use_compilation_cache(folder / "programs")  # small ones too: each message is a process
            given = replace(make(context), out=None, resume=False, test=None, validation=None)
            reply = act(Client(given, number, folder), message.content)
        except InputError as error:  # the server says it, too
            print(f"fedjax_peft: {error}", flush=True)
            reply = pack({}, {"error": str(error), "client": context.node_config.get("client")})
        return flwr.app.Message(_content(reply, {}), reply_to=message)

    @app.query()
    def query(message: Any, context: Any) -> Any:
        return answer(message, context, lambda client, sent: client.hello(_bytes(sent)))

    @app.train()
    def train(message: Any, context: Any) -> Any:
        def act(client: Client, sent: Any) -> bytes:
            return client.train(_bytes(sent), int(sent[_TABLE]["kept"]))

        return answer(message, context, act)

    return app


def server_app(make: Callable[[Any], Given], clients: int, patience: float = 600.0) -> Any:
    """Returns a ``ServerApp``; the arguments are those of :func:`flower`."""
    app = _flwr().serverapp.ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        try:
            given = make(context)
            serve(given, _Nodes(grid, patience, given.system.deadline), clients)
        except InputError as error:  # Flower writes it into its log, with the traceback
            raise error.with_traceback(None) from None

    return app


class _Nodes:
    """The clients behind Flower's grid."""

    def __init__(self, grid: Any, patience: float, deadline: float | None):
        self._grid, self._patience, self._deadline = grid, patience, deadline
        self._nodes: dict[int, int] = {}  # client -> node
        self._known: set[int] = set()

    def greet(self, request: bytes, clients: int) -> dict[int, bytes]:
        """Returns number -> ``Client.hello``, when all have answered or the patience is at its end.

        Raises:
          InputError: two nodes say the same number, or one says a number that there is not.
        """
        found: dict[int, bytes] = {}
        for node, reply in self._meet(request, self._patience, lambda: len(found) < clients):
            said = table_of(reply, f"node {node}")
            if "error" in said:
                raise InputError(f"A client cannot begin: {show(said['error'], 1000)}")
            number = said.get("client")
            if not isinstance(number, int) or not 0 <= number < clients or number in found:
                known = "is there already" if number in found else f"is not below {clients}"
                raise InputError(
                    f"A SuperNode says that it is client {number!r}, which {known}: start each"
                    " with another --node-config 'client=NUMBER', from 0."
                )
            found[number], self._nodes[number] = reply, node
        return found

    def train(
        self, round_index: int, message: bytes, kept: Mapping[int, int]
    ) -> Iterator[tuple[int, bytes | Lost]]:
        """Yields the clients' answers in the order in which they arrive."""
        online = {*self._grid.get_node_ids()}
        again = min(self._patience, self._deadline or _AGAIN)
        for node, reply in self._meet(pack({}, {}), again, lambda: bool(online - self._known)):
            # A SuperNode that was started again is another node. For a minute Flower takes the one
            # that was killed for connected, so the newer one counts.
            with contextlib.suppress(InputError):
                number = table_of(reply, f"node {node}").get("client")
                if isinstance(number, int):
                    self._nodes[number] = node
        online = {*self._grid.get_node_ids()}
        there = {self._nodes[c]: c for c in kept if self._nodes.get(c) in online}
        for client in sorted({*kept} - {*there.values()}):
            yield client, Lost("its SuperNode is not connected")
        messages = {node: (message, {"kept": kept[client]}) for node, client in there.items()}
        sent = self._push("train", str(round_index), messages)
        end = None if self._deadline is None else time.monotonic() + self._deadline
        while sent:
            for node, answer in self._pull(sent):
                yield there[node], answer
            if end is not None and time.monotonic() > end:
                for node in sent.values():
                    yield there[node], Lost(f"no answer within {self._deadline:g} seconds")
                return

    def _meet(
        self, request: bytes, seconds: float, more: Callable[[], bool]
    ) -> Iterator[tuple[int, bytes]]:
        """Yields the answers of nodes that are new; one whose process has failed is asked again."""
        sent, end = dict[str, int](), time.monotonic() + seconds
        while more() and time.monotonic() < end:
            new = {*self._grid.get_node_ids()} - self._known - {*sent.values()}
            sent |= self._push("query", "hello", {node: (request, {}) for node in new})
            for node, reply in self._pull(sent):
                if isinstance(reply, Lost):
                    print(f"fedjax_peft: node {node} has failed: {one_line(reply)}", flush=True)
                else:
                    self._known.add(node)
                    yield node, reply

    def _push(self, kind: str, group: str, messages: Mapping[int, Any]) -> dict[str, int]:
        """Sends messages; returns the number of each message -> its node."""
        message = _flwr().app.Message
        made = [
            message(_content(*parts), node, kind, group_id=group)
            for node, parts in messages.items()
        ]
        sent = zip(self._grid.push_messages(made), messages, strict=True) if made else ()
        return {number: node for number, node in sent if number}  # None: it could not be sent

    def _pull(self, sent: dict[str, int]) -> Iterator[tuple[int, bytes | Lost]]:
        """Yields the answers that have come, and removes their messages from ``sent``."""
        replies = list(self._grid.pull_messages([*sent])) if sent else []
        for reply in replies:
            node = sent.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                yield node, Lost(reply.error.reason or f"error {reply.error.code} of Flower")
                continue
            try:
                yield node, _bytes(reply.content)
            except InputError as error:
                yield node, Lost(str(error))
        if not replies:
            time.sleep(_POLL)


def _content(message: bytes, table: dict[str, Any]) -> Any:
    """Returns the records of a message of Flower."""
    app = _flwr().app
    array = app.Array("uint8", (len(message),), "safetensors", message)
    arrays = app.ArrayRecord({_BYTES: array})
    return app.RecordDict({_BYTES: arrays, _TABLE: app.ConfigRecord(table)})


def _bytes(content: Any) -> bytes:
    """Returns the bytes of a message of Flower."""
    try:
        return bytes(content[_BYTES][_BYTES].data)
    except (KeyError, AttributeError, TypeError) as error:
        raise InputError(f"A message of Flower has no bytes of fedjax_peft: {error!r}.") from None


def _number(context: Any) -> int:
    known = context.node_config
    number = known.get("client", known.get("partition-id"))  # Flower's own word
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise InputError(
            f"The SuperNode does not say which client it is (client = {number!r}): start it with"
            " --node-config 'client=NUMBER', numbered from 0."
        )
    return number


def _flwr() -> Any:
    """Returns Flower.

    Raises:
      InputError: it is not installed.
    """
    try:
        import flwr.app
        import flwr.clientapp
        import flwr.serverapp
    except ImportError:
        raise InputError(
            "Real clients need Flower: pip install 'flwr>=1.42,<1.43', in an environment of its"
            " own, because Flower limits the versions of some libraries."
        ) from None
    return flwr
