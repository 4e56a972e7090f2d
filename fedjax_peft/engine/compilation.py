"""Where compiled programs are kept: in memory for this process, and on disk for later ones."""

import hashlib
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import jax

from fedjax_peft.support import assets
from fedjax_peft.support.processor import processor

P = TypeVar("P")


class Programs:
    """Compiled programs of models, found again by everything that they depend on.

    A program belongs to an owner, the ``apply`` of its model, and is dropped with it. Neither a key
    nor a program may refer to the owner, except weakly: the owner would then live as long as they.
    """

    def __init__(self, bound: int):
        """Makes an empty cache.

        Args:
          bound: the largest number of programs; those that were used last are kept.
        """
        self.bound = bound
        self._kept: OrderedDict[Any, Any] = OrderedDict()

    def get(self, owner: Any, key: Hashable, make: Callable[[], P]) -> P:
        """Returns the owner's program with this key, which is made if it is not known."""
        place = self._place(owner, key)
        program = self._kept.pop(place, None)
        if program is None:
            program = make()
        if place is not None:
            self._kept[place] = program  # the newest one is last
        while len(self._kept) > self.bound:
            self._kept.popitem(last=False)
        return program

    def known(self, owner: Any, key: Hashable) -> bool:
        """Returns whether the owner has a program with this key."""
        return self._place(owner, key) in self._kept

    def of(self, owner: Any) -> list[Any]:
        """Returns the owner's programs; that which was used last is the last one."""
        return [program for place, program in self._kept.items() if place[0]() is owner]

    def clear(self, owner: Any = None) -> None:
        """Forgets the owner's programs; by default all programs.

        A session keeps the programs that it has used, for as long as it lives.
        """
        for place in list(self._kept):
            if owner is None or place[0]() is owner:
                self._kept.pop(place, None)

    def __len__(self) -> int:
        """Returns the number of programs."""
        return len(self._kept)

    def _place(self, owner: Any, key: Hashable) -> tuple[weakref.ref, Hashable] | None:
        """Returns the key among all programs; None for an owner without weak references."""
        try:
            return weakref.ref(owner, self._forget), key
        except TypeError:
            return None

    def _forget(self, gone: weakref.ref) -> None:
        for place in list(self._kept):
            if place[0] is gone:
                self._kept.pop(place, None)


programs = Programs(bound=32)
"""The programs of this process. Each one holds memory and, on a CPU, memory maps."""


def use_compilation_cache(shared: Path | None = None) -> None:
    """Makes JAX cache programs in the library's cache directory.

    JAX caches programs that take a second or more to compile; all of them in a directory of several
    workers, with a folder for each kind of processor. A directory that the user has chosen
    (with ``JAX_COMPILATION_CACHE_DIR`` or in ``jax.config``) is not replaced, and
    ``jax_enable_compilation_cache = False`` stays in force.

    Args:
      shared: the directory of several workers.
    """
    chosen = jax.config.jax_compilation_cache_dir is not None  # type: ignore[attr-defined]
    if not chosen and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        directory = assets.cache_dir() / "xla"
        if shared is not None:
            directory = shared / hashlib.sha256(repr(processor()).encode()).hexdigest()[:8]
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_compilation_cache_dir", str(directory))


def count_programs() -> Callable[[], str]:
    """Returns a function that says how many programs were compiled since, or taken from disk."""
    counts = dict.fromkeys(("compile_requests_use_cache", "cache_hits"), 0)

    def note(event: str, **_: Any) -> None:
        if (name := event.rpartition("/")[2]) in counts:
            counts[name] += 1

    def said() -> str:
        asked, known = counts.values()
        where = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        return f"Programs: {asked - known} compiled here, {known} taken from {where}"

    jax.monitoring.register_event_listener(note)
    return said


def options_that_repeat(lowered: jax.stages.Lowered, platform: str) -> dict[str, bool] | None:
    """Returns the options with which a platform's compiler makes a program that repeats its bits.

    A GPU's compiler otherwise chooses kernels by trying them, and some of these add in the order in
    which their parts end. ``XLA_FLAGS`` that name such an option are left to the user.

    Programs with cuDNN's attention get none. XLA (seen in that of JAX 0.11.2) then
    marks only the first of several equal gradients as deterministic, and finds no kernel for the
    others when the program runs ("raw_hash_map<>::at").
    """
    asked = "deterministic_ops" in os.environ.get("XLA_FLAGS", "")
    if platform != "gpu" or asked or "__cudnn$fmha" in lowered.as_text():
        return None
    return {"xla_gpu_exclude_nondeterministic_ops": True}
