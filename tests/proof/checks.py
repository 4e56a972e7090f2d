"""The comparisons of a draw: what must be equal however a run is executed.

* **reference**: the compiled round and the plain loop of ``Placement(engine="reference")``
* **places**: other lanes, padded lengths, and places of client states and examples
* **resume**: interrupted after a round and resumed, to the bit
* **sweep**: a point of a sweep and the run alone
* **turn**: loops of at most one turn, as in a GPU's program
* **mesh**: several devices (with ``devices``)
* **bytes**: the recorded traffic and an own count from shapes
* **finite**: no metric is infinite or NaN, unless a client's data are

Two programs round otherwise, so they may differ by 1e-5. Some methods amplify rounding (a sign, a
choice of the nearest upload); where the difference is larger, runs whose starts are disturbed by
a few 1e-7 say what rounding can do, and 30 times that is allowed.
"""

import contextlib
import dataclasses
import json
import pathlib
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from built import Built, options_of
from compared import difference, not_finite, observed
from draws import Draw
from traffic import counted

import fedjax_peft as fp

__all__ = ["Verdict", "check"]

CLOSE = {"bf16": 2.0**-8}
"""What two programs may differ by: one rounding of bfloat16; of float32, the usual 1e-5."""
AMPLIFIED = 30.0


class Verdict(NamedTuple):
    """What came out of a draw."""

    faults: list[str]
    notes: list[str]

    @property
    def word(self) -> str:
        """Returns ``equal``, ``amplified``, ``refused`` or the first word of the first fault."""
        if self.faults:
            return self.faults[0].split()[0]
        words = [note.split()[0].rstrip(":") for note in self.notes]
        return next((w for w in ("refused", "amplified") if w in words), "equal")


class _Crashed(Exception):
    """A run ended in something else than a result or a refusal."""


def check(draw: Draw, devices: bool = False) -> Verdict:
    """Returns the verdict of a draw; ``devices`` compares with a mesh of several devices too."""
    with tempfile.TemporaryDirectory(prefix="proof-") as folder:
        checks = _Checks(draw, pathlib.Path(folder), devices)
        try:
            checks.all()
        except _Crashed as crash:
            checks.faults.append(str(crash))
        return Verdict(checks.faults, checks.notes)


class _Checks:
    def __init__(self, draw: Draw, folder: pathlib.Path, devices: bool):
        self.draw, self.folder, self.devices = draw, folder, devices
        self.faults: list[str] = []
        self.notes: list[str] = []
        self.here = {"lanes": draw["lanes"], "length_buckets": draw["buckets"]}
        self.there = self._other_place()
        self._disturbed: tuple[float, str] | None = None

    def all(self) -> None:
        """Runs the draw, and compares."""
        draw = self.draw
        run, why = self._try("compiled", lambda: self._built().run(self.here))
        if run is None:
            self.notes.append("refused: " + why)
            self._reference_refuses_too()
            return
        self.run, self.result = run, self._observed(run)
        self._finite()
        self._bytes()
        for name in ("reference", "turn", "places", "resume", "sweep"):
            if draw[name] == "yes":
                getattr(self, f"_{name}")()
        if self.devices:
            self._mesh()

    def _built(self) -> Built:
        self.built = Built(self.draw)
        return self.built

    def _observed(self, run: fp.Run) -> dict[str, np.ndarray]:
        return observed(run, len(self.built.sizes))

    def _try(self, name: str, make: Callable[[], Any]) -> tuple[Any, str]:
        """Returns (result, ""), or (None, why) of a refusal."""
        try:
            return make(), ""
        except fp.InputError as error:
            return None, str(error)
        except Exception as error:  # whatever it is, it is a fault of the package
            raise _Crashed(f"CRASH {name}: {traceback.format_exc()[-1500:]}") from error

    def _must(self, name: str, make: Callable[[], fp.Run]) -> fp.Run | None:
        """Returns a run that may not be refused, for the first one was not."""
        run, why = self._try(name, make)
        if run is None:
            self.faults.append(f"REFUSED {name} alone: {why}")
        return run

    def _compare(self, name: str, run: fp.Run) -> None:
        worst, where = difference(self._observed(run), self.result)
        if worst <= CLOSE.get(self.draw["model"], 1e-5):
            return
        rounding, place = self._rounding()
        said = f"{name} {worst:.1e} at {where}"
        if worst < AMPLIFIED * rounding:
            self.notes.append("amplified " + said)
        else:
            self.faults.append(f"MISMATCH {said}; disturbed {rounding:.1e} at {place}")

    def _rounding(self) -> tuple[float, str]:
        """Returns how far starts that differ by a few 1e-7 lead.

        One may miss a jump to the next level of a compressor, so there are three.
        """
        if self._disturbed is None:
            far = [self._shaken(size) for size in (1e-7, 2e-7, 3e-7)]
            # The noise of privacy depends on the start, and then says nothing about rounding.
            useless = self.draw["privacy"] and max(far)[0] > 1e-2
            self._disturbed = (0.0, "") if useless else max(far)
        return self._disturbed

    def _shaken(self, size: float) -> tuple[float, str]:
        start = self.built.model.trainable
        shaken = jax.tree.map(lambda x: (x * (1 + size)).astype(x.dtype), start)
        model = self.built.model.replace(trainable=shaken)
        run = self._must("disturbed", lambda: self.built.run(self.here, model=model))
        return difference(self._observed(run), self.result) if run else (0.0, "")

    def _other_place(self) -> dict[str, Any]:
        draw = self.draw
        there = {"client_state": draw["other client_state"], "examples": draw["other examples"]}
        for field, here in {"lanes": "lanes", "buckets": "buckets"}.items():
            other = draw[f"other {field}"]
            there["length_buckets" if field == "buckets" else field] = (
                draw[here] if other == "same" else other
            )
        if draw["other reuse"] != "none":
            there["reuse"] = draw["other reuse"]
        return there

    def _reference_refuses_too(self) -> None:
        run = self._try("reference", lambda: self._built().run({"engine": "reference"}))[0]
        if run is not None:
            self.faults.append("ONE-REFUSES the reference accepts it")

    def _finite(self) -> None:
        if self.draw["nan client"] == "yes":
            bad = [k for k, x in self.run.params.items() if not np.isfinite(np.float32(x)).all()]
        else:
            bad = not_finite(self.run)
        if bad:
            self.faults.append(f"NOT-FINITE {bad[:4]}")

    def _bytes(self) -> None:
        own = counted(self.built, self.run)
        given = [(row["bytes_up"], row["bytes_down"]) for row in self.run.metrics[1:]]
        if own is not None:
            self.notes.append("bytes counted")
            if own != given:
                self.faults.append(f"BYTES given {given} own {own}")

    def _reference(self) -> None:
        place = {"engine": "reference"}
        run = self._must("reference", lambda: self.built.run(place, constant=True))
        if run:
            self._compare("reference", run)

    def _turn(self) -> None:
        model = self.built.model.replace(apply=_again(self.built.model.apply))
        with _turns():
            run = self._must("turn", lambda: self.built.run(self.here, model=model))
        if run:
            self._compare("turn", run)

    def _places(self) -> None:
        if self.draw["resume"] == "yes":
            return  # compares the same
        run, why = self._try("places", lambda: self.built.run(self.there))
        self._elsewhere(run, why)

    def _elsewhere(self, run: fp.Run | None, why: str) -> None:
        if run is not None:
            self._compare("places", run)
        elif "reuse" in self.there:
            self.notes.append("reuse is refused: " + why)
        else:
            self.faults.append(f"REFUSED places alone: {why}")

    def _resume(self) -> None:
        def part(**given: Any) -> fp.Run:
            return self.built.run(self.there, out=self.folder / "cut", **given)

        whole, why = self._try(
            "whole", lambda: self.built.run(self.there, out=self.folder / "whole")
        )
        self._elsewhere(whole, why)
        if whole is None:
            return
        last = min(1, self.draw["rounds"] - 1)
        self._must("cut", lambda: part(on_round=lambda row: row["round"] == last))
        again = self._must("resume", lambda: part(resume=True))
        if again is None:
            return
        worst, where = difference(self._observed(again), self._observed(whole))
        if worst > 0:
            self.faults.append(f"RESUME differs by {worst:.1e} at {where}")
        lines = (self.folder / "cut" / "metrics.jsonl").read_text().splitlines()
        rounds = [json.loads(line)["round"] for line in lines]
        if rounds != [row["round"] for row in whole.metrics]:
            self.faults.append(f"RESUME rows {rounds}")

    def _sweep(self) -> None:
        replicas = 1 + self.draw.number % 2
        run, why = self._try("sweep", lambda: self.built.swept(self.here, replicas))
        if run is None:
            self.notes.append("sweep refused: " + why)
        else:
            self._compare("sweep", run)

    def _mesh(self) -> None:
        place = {**options_of(self.draw["mesh"]), "lanes": "auto"}
        run, why = self._try("mesh", lambda: self.built.run(place))
        if run is None:
            self.notes.append("mesh refused: " + why)
        else:
            self._compare(f"mesh {self.draw['mesh']}", run)


@contextlib.contextmanager
def _turns() -> Iterator[None]:
    """Makes programs with a GPU's form of loops."""
    from fedjax_peft.engine import program

    kept, program.branch = program.branch, program.turn
    try:
        yield
    finally:
        program.branch = kept


def _again(apply: Any) -> Any:
    """Returns another object of the same forward pass, whose programs are compiled anew."""
    return dataclasses.replace(apply) if dataclasses.is_dataclass(apply) else lambda *a: apply(*a)
