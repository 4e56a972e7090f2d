"""The rounds of a deployed run: a message to the clients, their uploads, and the server's step."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft.contracts import PyTree, Total
from fedjax_peft.deploy.received import down, up_form
from fedjax_peft.deploy.wire import pack, table_of, unpack
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.program import Program
from fedjax_peft.engine.round import RoundResult
from fedjax_peft.engine.server_step import Collected, server_step
from fedjax_peft.engine.setup import Constants, Setup
from fedjax_peft.engine.start import RoundStart, start_round
from fedjax_peft.engine.state import State
from fedjax_peft.engine.uploads import no_measurements
from fedjax_peft.engine.work import Work, at_work
from fedjax_peft.numerics import summation, tree
from fedjax_peft.numerics.random import stream
from fedjax_peft.simulation.arguments import Given
from fedjax_peft.simulation.client_models import FEDERATION
from fedjax_peft.simulation.moment import Moment
from fedjax_peft.simulation.rows import Row, read_metrics, seen_clients
from fedjax_peft.support.digests import digest
from fedjax_peft.support.display import one_line, show
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file


class Lost(str):
    """Why there is no upload of a client."""


class Exchange(Protocol):
    """The way to the clients."""

    def greet(self, request: bytes, clients: int) -> dict[int, bytes]:
        """Returns number -> ``Client.hello`` of the clients that can be reached."""

    def train(
        self, round_index: int, message: bytes, kept: Mapping[int, int]
    ) -> Iterator[tuple[int, bytes | Lost]]:
        """Yields ``Client.train`` of these clients, in the order in which they arrive.

        Args:
          kept: client -> its last round that counts.
        """


class Rounds:
    """The rounds of a deployed run: their program, and who was lost."""

    def __init__(self, exchange: Exchange, known: Sequence[Mapping[str, Any]], given: Given):
        out = None if given.out is None else Path(given.out)
        sizes = [one["examples"] for one in known]
        self._exchange, self._out, self._seed = exchange, out, given.seed
        self._said = known
        place = "" if out is None else str(out.resolve())
        self._table = {
            "run": digest([place, given.seed, *sizes]),
            "clients": len(sizes),
            # Mechanisms of privacy depend on the sizes; otherwise no client learns the others'.
            "sizes": None if given.privacy is None else list(sizes),
        }
        self._kept: dict[int, int] | None = None
        self.lost: dict[int, str] = {}

    def measure(self, moment: Moment) -> Row:
        """Returns the fields of a row that only a deployed run has."""
        if moment.info is None and self._out is not None:  # the run has its directory now
            replace_file(self._out / FEDERATION, json.dumps(self._said).encode())
        if moment.info is None or "lost" in moment.row or not self.lost:
            return {}
        return {"lost": {str(client): why for client, why in sorted(self.lost.items())}}

    def program(self, setup: Setup, columns: Any, *, work: Work = "training", **form: Any) -> Any:
        """Makes a round program, or one that evaluates."""
        if work != "training":
            return Program(setup, columns, work=work, **form)
        return _Program(at_work(setup, "training"), self)

    def kept(self, round_index: int) -> dict[int, int]:
        """Returns client -> its last round before this one whose upload counts."""
        if self._kept is None:
            path = None if self._out is None else self._out / "metrics.jsonl"
            self._kept = {}
            for row in read_metrics(path) if path is not None and path.exists() else ():
                if row["round"] < round_index:
                    self.keep(row["round"], seen_clients([row]))
        return self._kept

    def keep(self, round_index: int, clients: Any) -> None:
        """Notes whose uploads of a round count."""
        assert self._kept is not None
        self._kept |= dict.fromkeys(clients, round_index)

    def uploads(
        self, setup: Setup, start: RoundStart, index: int
    ) -> Iterator[tuple[int, PyTree, dict[str, Any]]]:
        """Yields slot, upload and report of the clients, in the order of the slots.

        An upload is yielded when all before it have come, so that the sum is always the same.
        """
        state, plan, template = start.state, start.plan, start.template
        sent = down(
            setup, state.server, start.present.broadcast, start.received, state.aggregator_state
        )
        table = {**self._table, "round": index, "seed": self._seed}
        worked = np.flatnonzero(plan.length * ~plan.silent_slots)
        slots = {int(plan.client[slot]): int(slot) for slot in worked}
        kept = {client: self.kept(index).get(client, 0) for client in slots}
        (form, wires), arrived = up_form(setup, template), dict[int, tuple[PyTree, dict]]()
        waiting, self.lost = sorted(slots.values()), {}
        base = None if setup.algorithm.aggregator.randomise is not None else template
        for client, reply in self._exchange.train(index, pack(sent, table), kept):
            try:
                if isinstance(reply, Lost):
                    raise InputError(reply)
                sender = f"client {client}"
                report = _report(table_of(reply, sender, form), client, table, setup, plan)
                upload = unpack(reply, form, sender, base, wires)[0]
                arrived[slots[client]] = upload, report
            except InputError as error:
                self._lose(index, client, str(error))
                waiting.remove(slots[client])
            while waiting and waiting[0] in arrived:
                slot = waiting.pop(0)
                yield (slot, *arrived.pop(slot))
        for slot in waiting:
            if slot in arrived:
                yield (slot, *arrived.pop(slot))
            else:
                self._lose(index, int(plan.client[slot]), "it has not answered")

    def _lose(self, index: int, client: int, why: str) -> None:
        self.lost[client] = why
        text = f"fedjax_peft: round {index} goes on without client {client}: {why}"
        print(one_line(text), file=sys.stderr, flush=True)


def _report(
    table: Mapping[str, Any], client: int, asked: Mapping[str, Any], setup: Setup, plan: Plan
) -> dict[str, Any]:
    """Returns the report of a client, which must be of this round."""
    if "error" in table:
        raise InputError(show(table["error"], 1000))
    for name, wanted in (("client", client), ("run", asked["run"]), ("round", asked["round"])):
        if table.get(name) != wanted:
            raise InputError(
                f"it answers for {name} {show(table.get(name))} instead of {show(wanted)}"
            )
    try:
        return {
            "finite": bool(table["finite"]),
            "norm": float(table["norm"]),
            "sums": {str(n): (float(s), float(c)) for n, (s, c) in table["sums"].items()},
            "shares": {str(name): float(x) for name, x in table["shares"].items()},
            "measured": [float(x) for x in table["measured"]],
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"its report cannot be read: {error!r}") from None


class _Program:
    """The program of a deployed round, with the methods of a round program."""

    compile_seconds = 0.0
    peak_bytes = 0

    def __init__(self, setup: Setup, rounds: Rounds):
        self._setup, self._rounds = setup, rounds

    def known(self, state: State, plan: Plan) -> bool:
        """Returns True: there is nothing to compile."""
        return True

    def __call__(self, state: State, plan: Plan, round_index: int) -> RoundResult:
        """Runs round ``round_index``; the state is not consumed."""
        setup, key = self._setup, stream(int(state.seed), "clients")
        constants = Constants(setup.frozen, setup.fixed, setup.rank_mask or {}, {})
        before = jax.tree.map(jnp.asarray, state.on_device())
        start = start_round(setup, constants, before, plan, key, jnp.int32(round_index))
        total, reports = self._sum(start, round_index)
        worked = np.isin(np.arange(len(plan.client)), [*reports])
        plan = plan._replace(
            client=np.where(worked, plan.client, -1).astype(np.int32),
            weight=np.where(worked, plan.weight, 0).astype(np.float32),
            length=np.where(worked, plan.length, 0).astype(np.int32),
        )
        start = start._replace(plan=start.plan._replace(client=plan.client))
        parts = (setup.transform, setup.algorithm, start.template, start.received)
        empty = no_measurements(*parts, len(plan.client))
        info = _by_slot(reports, len(plan.client), len(jax.tree.leaves(empty)))
        accepted = jnp.asarray(info["finite"] & worked & (plan.weight > 0))
        sums, own = info["sums"], jax.tree.unflatten(jax.tree.structure(empty), info["measured"])
        updated = server_step(setup, start, Collected(total, sums, accepted, own))
        self._rounds.keep(round_index, plan.client[info["finite"] & worked].tolist())
        after = before._replace(server=updated.server, aggregator_state=updated.aggregator_state)
        if setup.transform is not None:
            transform = before.transform_state._replace(server=updated.transform_state)
            after = after._replace(transform_state=transform)
        named = {"sums": sums, "shares": info["shares"], "plan": plan}
        named |= {"finite": jnp.asarray(info["finite"]), "norms": jnp.asarray(info["norm"])}
        named |= {"sent_leaves": start.sent_leaves, "aggregation": updated.metrics}
        return RoundResult(after, predictions={}, **named)

    def _sum(self, start: RoundStart, round_index: int) -> tuple[Total, dict[int, dict[str, Any]]]:
        """Returns the sum of the usable uploads, and slot -> report."""
        setup, aggregator = self._setup, start.aggregator
        weights, reports = np.array(start.plan.weight), dict[int, dict[str, Any]]()
        total = summation.empty(aggregator, start.template, setup.fixed, len(weights))
        if aggregator.randomise is not None:  # clients have done that, and lifted
            aggregator = aggregator._replace(lift=lambda sent, *_: sent, randomise=None)
            weights = np.where(weights == 0, 1.0, weights).astype(np.float32)
        for slot, upload, report in self._rounds.uploads(setup, start, round_index):
            report["finite"] &= bool(tree.all_finite(upload))
            reports[slot] = report
            if report["finite"]:
                one = jax.tree.map(lambda x: jnp.asarray(x)[None], upload)
                place = jnp.array([slot], jnp.int32)
                inputs = (one, jnp.asarray(weights[[slot]]), place, start.template, setup.fixed)
                total = summation.add(aggregator, total, *inputs)
        return total, reports


def _by_slot(reports: Mapping[int, Mapping[str, Any]], slots: int, measured: int) -> dict[str, Any]:
    """Returns what clients have reported, as arrays ``[slots]``."""
    finite = np.ones(slots, bool)
    norm, numbers = np.zeros(slots, np.float32), np.zeros((measured, slots), np.float32)
    sums: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    shares: dict[str, np.ndarray] = {}
    for slot, report in reports.items():
        finite[slot] = report["finite"]
        for name, pair in report["sums"].items():
            empty = (np.zeros(slots, np.float32), np.zeros(slots, np.float32))
            for all_, one in zip(sums.setdefault(name, empty), pair, strict=True):
                all_[slot] = one
        if not report["finite"]:
            continue
        norm[slot] = report["norm"]
        for name, share in report["shares"].items():
            shares.setdefault(name, np.ones(slots, np.float32))[slot] = share
        for row, number in zip(numbers, report["measured"], strict=False):
            row[slot] = number
    found = {"finite": finite, "norm": norm, "sums": sums, "shares": shares}
    return {**found, "measured": [jnp.asarray(row) for row in numbers]}
