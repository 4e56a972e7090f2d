"""The commands ``init``, ``config``, ``partition``, ``privacy``, ``bench``, ``list`` and so on.

Heavy modules are imported inside the functions, so that ``--help`` answers at once.
"""

import argparse
import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjax_peft.cli.process import prepare_jax
from fedjax_peft.support import accelerators, assets, display, source

if TYPE_CHECKING:
    from fedjax_peft.data.catalog import Source


def init(options: argparse.Namespace) -> None:
    """Writes a config for the user's data and prints the command that runs it."""
    from fedjax_peft.cli.init import write_project

    sep = {"\\t": "\t", "tab": "\t"}.get(options.sep, options.sep)
    form = {"sep": sep, "encoding": options.encoding, "header": options.header}
    project = write_project(
        options.directory,
        data=options.data,
        text=options.text,
        label=options.label,
        csv_form={key: value for key, value in form.items() if value is not None},
    )
    print(*project.files, sep="\n")
    print(display.one_line(f"Text column: {project.text!r}. Label column: {project.label!r}."))
    config = options.directory / "config.toml"
    out = Path("runs") / options.directory.absolute().name
    print(f"Next: fedjax-peft run {shlex.quote(str(config))} --out {shlex.quote(str(out))}")


def partition(options: argparse.Namespace) -> None:
    """Prints and writes the report of a config's partition."""
    prepare_jax()
    from rich.console import Console

    from fedjax_peft.config import config as configs
    from fedjax_peft.report import partition as reports
    from fedjax_peft.report import partition_files

    out = options.out or Path("runs") / f"{options.config.stem}-partition"
    raw = configs.methods(configs.load(options.config), options.overrides)
    resolved = {name: configs.resolve(one) for name, one in raw.items()}
    distinct = reports.distinct_partitions(resolved)
    for name, config in distinct.items():
        _, clients = configs.federation(config)
        report = reports.inspect(
            clients,
            reports.title(config),
            by=options.by or reports.classes_key(config),
            measure=options.measure,
            base=math.e if options.base == "e" else float(options.base),
        )
        Console().print(reports.size_table(report), "", reports.class_table(report), sep="\n")
        for path in partition_files.write(report, out / name if len(distinct) > 1 else out):
            print(path)


def privacy(options: argparse.Namespace) -> None:
    """Prints the noise that an ε needs, or the ε of a noise."""
    from fedjax_peft.cli.privacy import Plan, plan_text

    client = options.unit == "client"
    names = ("clients", "per_round") if client else ("examples", "batch_size")
    for name in names:
        if getattr(options, name) is None:
            options.parser.error(f"--unit {options.unit} needs --{name.replace('_', '-')}")
    plan = Plan(
        options.rounds,
        getattr(options, names[0]),
        getattr(options, names[1]),
        options.delta,
        epsilon=options.epsilon,
        noise_multiplier=options.noise_multiplier,
        unit=options.unit,
        sampling=options.sampling,
        steps=options.steps,
        neighbours=options.neighbours,
    )
    print(plan_text(plan))


def bench(options: argparse.Namespace) -> None:
    """Prints the speed of the local-update engine."""
    prepare_jax(cache=False)  # with the cache, compile_s would be the time of a look-up
    from fedjax_peft.cli import bench as benching
    from fedjax_peft.cli import console
    from fedjax_peft.config import config as configs

    given: dict[str, Any] = {}
    for text in options.overrides:
        given = configs.override(given, text)
    shape = benching.Shape(**configs.check_arguments(benching.Shape, given))
    with console.progress_lines("bench") as on_phase:
        result = benching.bench(shape, on_phase)
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        if key != "shape":
            print(f"{key:20} {value:,.4g}" if isinstance(value, float) else f"{key:20} {value}")


def doctor(options: argparse.Namespace) -> None:
    """Prints what a bug report needs to know about this machine."""
    prepare_jax()
    from fedjax_peft.cli.doctor import report

    print(*map(display.printable, report()), sep="\n")


def explain(options: argparse.Namespace) -> None:
    """Prints the meaning, the type and the default of a config key."""
    from fedjax_peft.cli.explain import explain

    print(explain(options.key))


def list_assets(options: argparse.Namespace) -> None:
    """Fetches one asset and prints its path, or lists all assets."""
    if options.name is not None:
        print(assets.fetch(options.name))
        return
    for name, asset in assets.ASSETS.items():
        state = "fetched" if assets.is_cached(name) else "not fetched"
        print(f"{name:14} {state:12} {asset.description} ({asset.licence})")
    print(f"Stored in {assets.cache_dir()} (set FEDJAX_PEFT_CACHE to change the directory).")


def completion(options: argparse.Namespace) -> None:
    """Prints the completion script for a shell."""
    from fedjax_peft.cli.completion import script

    print(script(options.root, options.shell))


def list_names(options: argparse.Namespace) -> None:
    """Lists the names that a config can use, with descriptions.

    Names and descriptions are read from the source: importing them all would take seconds.
    """
    from fedjax_peft.cli.listing import listing
    from fedjax_peft.config import presets
    from fedjax_peft.data.catalog import DATASETS

    folder = assets.cache_dir() / "data"
    tables = source.keys("fedjax_peft.config.keys", "NAMESPACES")
    sections = {
        "models": {
            **{name: a.description for name, a in assets.ASSETS.items() if a.kind == "model"},
            "(a checkpoint)": "hub id or path of a backbone below (config.json + safetensors)",
        },
        "backbones (model_type) and their heads": _backbones(),
        f"data sets (from source = DIR or {folder}/NAME, otherwise as described)": {
            **{name: _data_lines(entry) for name, entry in DATASETS.items()},
            "(a directory)": "with json, csv or parquet files, images, or LEAF's json by user",
        },
        **{table: source.FirstLines(module) for table, (module, _) in tables.items()},
        "presets (preset = ...), and the keys that you choose": presets.lines(),
        "devices (plan --device)": accelerators.lines(),
    }
    print(listing(sections, options.words))


def upgrade(options: argparse.Namespace) -> None:
    """Rewrites config files of an earlier version, and prints what has changed."""
    from fedjax_peft.config.upgrade import upgrade_file

    for path in options.files:
        changes = upgrade_file(path)
        print(display.one_line(f"{path}: {', '.join(changes) or 'has present keys already'}"))


def _backbones() -> dict[str, str]:
    """Returns the families of models -> their heads."""
    families = source.keys("fedjax_peft.models.registry", "FAMILIES")
    return {name: ", ".join(_heads(family)) for name, family in families.items()}


def _heads(place: source.Place) -> list[str]:
    """Returns the kinds of heads that a statement names, itself or by the functions that it calls.

    A statement that names some calls no function for them but ``class_kinds`` and ``text_kinds``.
    """
    kinds = source.strings(source.find("fedjax_peft.models.heads", "__all__"))
    found = {text for text in source.strings(place) if text in kinds}
    for module, function in source.called(place):
        if not found or getattr(function, "name", "").endswith("_kinds"):
            found |= {*_heads((module, function))}
    return [kind for kind in kinds if kind in found]


def _data_lines(entry: "Source") -> str:
    """Returns the description of a data set and the ways to get it, one on each line."""
    if entry.parts:
        ways = [f"the data sets {', '.join(entry.parts)}", "validation: a split of its own"]
        return "\n".join([entry.description, *ways, *_paper_line(entry)])
    ways = ["from PyPI"] if entry.asset else []
    ways += [f"from the hub, {entry.hub}"] if entry.hub else []
    ways += [f"by hand: {entry.download}"]
    share = "a share of train, as in validation_share = 0.1"
    ways += [f"validation: {share if entry.validation is None else 'the official split'}"]
    return "\n".join([entry.description, *ways, *_paper_line(entry)])


def _paper_line(entry: "Source") -> list[str]:
    """Returns a line about ``partition = "paper"`` for a data set; no line if there is none."""
    settings = entry.settings
    if settings.partition is None:
        return []
    options = {k: v for k, v in settings.partition.items() if k != "name"}
    arguments = ", ".join(f"{key} = {value}" for key, value in options.items())
    return [
        f'partition = "paper": {settings.partition["name"]} ({arguments}),'
        f" {settings.clients_per_round} clients per round, {settings.rounds} rounds"
        f" ({settings.paper})"
    ]
