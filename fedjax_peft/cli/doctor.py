"""The command ``doctor``: what this machine has, as one paragraph for a bug report."""

import argparse
import os
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jax

from fedjax_peft.simulation.planning import product_rates
from fedjax_peft.simulation.storage.record import environment
from fedjax_peft.support import assets, libraries
from fedjax_peft.support.display import counted, printable
from fedjax_peft.support.memory import available, gigabytes
from fedjax_peft.support.version import __version__

_DISK = 2e9
"""Bytes below which a disk is small: a model and its checkpoints."""


def doctor(options: argparse.Namespace) -> None:
    """Prints what a bug report needs to know, without a blank line; faults come last."""
    found = environment()
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    commit = f" ({found['commit'][:12]})" if found["commit"] else ""
    cache, programs = assets.cache_dir(), jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    free, rates = available(), product_rates.product_rates()
    lines = {
        "fedjax_peft": f"{__version__}{commit}, Python {found['python']}, {found['platform']}",
        "libraries": versions,
        "devices": f"{found['device']}; {os.cpu_count()} cores, {found['processor']['model']}",
        "products": product_rates.in_words(rates),
        "memory": "unknown" if free is None else f"{gigabytes(free)} free",
        "disk": f"{gigabytes(_free(cache))} free for caches, {gigabytes(_free(Path()))} here",
        "cache": f"{cache} ({_stored(cache)})",
        "programs": f"{programs} ({_stored(Path(programs))})" if programs else "not kept",
        "extras": _extras(),
        "settings": ", ".join(_settings()) or "none",
    }
    width = max(map(len, lines))
    notices = [f"! {text}" for text in (product_rates.advice(rates),) if text]
    told = (f"{name:{width}}  {text}" for name, text in lines.items())
    for line in [*told, *notices, *_faults(cache)]:
        print(printable(line))


def _extras() -> str:
    """Returns which optional parts of the package are there, and what the others lack."""
    extras = metadata.metadata("fedjax_peft").get_all("Provides-Extra") or []
    missing = {extra: [*_missing("fedjax_peft", extra)] for extra in extras}
    there = [extra for extra, packages in missing.items() if not packages]
    absent = [f"{extra} (no {', '.join(lacks)})" for extra, lacks in missing.items() if lacks]
    return f"{', '.join(there) or 'none'}; not there: {', '.join(absent) or 'none'}"


def _missing(package: str, extra: str) -> Iterator[str]:
    """Yields the packages of an extra, such as ``jax[cuda13]``, that are not installed."""
    for line in libraries.requirements(package, extra):
        name, of = re.findall(r"^([\w.-]+)(?:\[([\w-]+)\])?", line)[0]
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name
        else:
            yield from _missing(name, of) if of else ()


def _settings() -> Iterator[str]:
    """Yields the environment variables that change how the libraries work; no other is shown."""
    for name, value in sorted(os.environ.items()):
        if re.match(r"(FEDJAX_PEFT|JAX|XLA)_|CUDA_VISIBLE_DEVICES$|HF_HUB_OFFLINE$", name):
            yield f"{name}={value}"


def _faults(cache: Path) -> Iterator[str]:
    """Yields a sentence for each fault that a run would meet."""
    if shutil.which("nvidia-smi") and jax.default_backend() == "cpu":
        yield f"! There is an NVIDIA driver, and JAX sees no GPU: {libraries.install('cuda')}."
    for place in {_existing(cache), Path.cwd()}:
        if not os.access(place, os.W_OK):
            yield f"! {place} cannot be written to."
        if _free(place) < _DISK:
            yield f"! There is little space in {place}: runs keep checkpoints, caches keep models."


def _existing(path: Path) -> Path:
    """Returns a path, or the nearest folder above it that exists."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _free(path: Path) -> int:
    return shutil.disk_usage(_existing(path)).free


def _stored(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return (
        f"{gigabytes(sum(path.stat().st_size for path in files))} in {counted(len(files), 'file')}"
    )
