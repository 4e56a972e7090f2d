"""The command line: ``fedjax-peft``."""

import argparse
import contextlib
import difflib
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fedjax_peft import __version__, assets, display, libraries
from fedjax_peft.cli import faults
from fedjax_peft.errors import InputError, nearest
from fedjax_peft.files import check_output, replace_file

if TYPE_CHECKING:
    from fedjax_peft.data.catalog import Source
    from fedjax_peft.loading import TrainedModels
    from fedjax_peft.report.records import RunRecord

__all__ = ["main"]

_RUN_HELP = """\
a config is a TOML file; every key of it can be replaced on the command line:
  fedjax-peft run my.toml rounds=20 peft.rank=8 algorithm=fedprox --out runs/mine

to write a config, and to find its keys:
  fedjax-peft init mine                a commented config for your own data, ready to run
  fedjax-peft list                     what can be named: models, data sets, algorithms ...
  fedjax-peft list algorithm ditto     what an algorithm is, and its keys
  fedjax-peft list keys rate           all keys that have to do with "rate"
  fedjax-peft run --explain peft.rank  what one key means, its type and its default
"""

# Everything heavy is imported inside the commands: --help and list should answer at once.


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0, or 2 for bad input or a fault of the machine.

    Every error of files, encodings and memory ends here, as one paragraph (:mod:`.faults`).
    """
    libraries.prepare()
    faults.guard_streams()
    try:
        try:
            return _main(arguments)
        finally:  # of --help too, which ends with SystemExit
            faults.flush_output()
    except InputError as error:
        faults.tell(f"fedjax-peft: {error}")
        return 2
    except KeyboardInterrupt as interrupt:
        advice = f". {interrupt}" if str(interrupt) else ""
        faults.tell(f"\nfedjax-peft: interrupted{advice}")
        return 130
    except BrokenPipeError:  # the reader of our output has gone (`| head`)
        faults.silence_output()
        return 0
    except Exception as error:
        text = faults.explain(error)
        if text is None:
            raise
        faults.tell(f"fedjax-peft: {text}")
        if faults.is_output_fault():  # Python would report it again at exit
            faults.silence_output()
        return 2


def _main(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    words = sys.argv[1:] if arguments is None else list(arguments)
    options, rest = parser.parse_known_args(words)
    # argparse takes key=value only in one place of the line; we take it anywhere.
    if any(word.startswith("-") or "=" not in word for word in rest) or (
        rest and not hasattr(options, "overrides")
    ):
        advice = _advice(rest, words, options)
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}{advice}")
    if rest:
        options.overrides += rest
    options.command(options)
    return 0


class _ArgumentParser(argparse.ArgumentParser):
    """Shows arguments that it refuses without terminal escapes, and shortened."""

    def error(self, message: str) -> NoReturn:
        super().error(display.paragraph(message))


class _Explain(argparse.Action):
    """Answers ``--explain KEY`` at once, as ``--help`` does, so that no config is needed."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        from fedjax_peft.cli.explain import explain

        print(explain(values))
        parser.exit()


def _advice(rest: Sequence[str], words: Sequence[str], options: argparse.Namespace) -> str:
    """Returns how an unknown option is written: another option, or a config key without dashes."""
    option, equals, value = next((w for w in rest if w.startswith("--")), "").partition("=")
    known = [name for name in options.parser._option_string_actions if name.startswith("--")]
    if not option:
        return ""
    close = difflib.get_close_matches(option[2:], [name[2:] for name in known], cutoff=0.7)
    if close or not hasattr(options, "overrides"):
        return f". {nearest(option, known)}"
    if not equals:
        after = words[words.index(option) + 1 :]
        value = after[0] if after and not after[0].startswith("-") else "VALUE"
    return f". A config key is written without dashes: {option[2:].replace('-', '_')}={value}"


def _parser() -> argparse.ArgumentParser:
    parser = _ArgumentParser(
        prog="fedjax-peft",
        description="Simulate federated parameter-efficient fine-tuning of transformers.",
    )
    parser.add_argument("--version", action="version", version=f"fedjax_peft {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function: Callable[[argparse.Namespace], None], text: str) -> Any:
        name = function.__name__.strip("_")
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=function, parser=added)
        return added

    run = command(_run, "run a config file")
    run.epilog = _RUN_HELP
    run.formatter_class = argparse.RawDescriptionHelpFormatter
    run.add_argument("config", type=Path, metavar="CONFIG.toml")
    run.add_argument(
        "--explain",
        action=_Explain,
        metavar="KEY",
        help="say what a config key means, and stop: peft.rank, rank, algorithm",
    )
    run.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="only this [methods.NAME]"
    )
    _add_overrides(run)
    _add_run_options(run)

    new = command(_init, "write a commented config for your own data, ready to run")
    new.add_argument("directory", type=Path, metavar="DIR")
    new.add_argument(
        "--data", type=Path, metavar="FILE", help="your table; without it, a small sample is made"
    )
    new.add_argument("--text", metavar="COLUMN", help="of the texts; by default it is guessed")
    new.add_argument("--label", metavar="COLUMN", help="of the labels; by default it is guessed")

    resume = command(_resume, "continue an interrupted run")
    resume.add_argument("run", type=Path, metavar="RUN", help="or the folder of several methods")
    resume.add_argument(
        "overrides", nargs="*", metavar="rounds=N", help="more rounds than the run was to have"
    )
    _add_verbosity(resume)
    resume.set_defaults(resume=True, overwrite=False, dry_run=False)

    demo = command(_demo, "compare three methods on real data; a few minutes on two CPU cores")
    _add_overrides(demo)
    _add_run_options(demo)

    report = command(_report, "compare runs: table, report.html and curves")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="or a folder of runs")
    report.add_argument("--out", type=Path, metavar="DIR", help="default: beside the runs")
    report.add_argument(
        "--target",
        type=float,
        metavar="0.8",
        help="also what it took to reach 90, 95 and 99 %% of this test score",
    )

    export = command(_export, "write a run's adapter and head, or the merged model")
    export.add_argument("run", type=Path, metavar="RUN")
    export.add_argument(
        "--format",
        choices=["peft", "adapterhub", "merged"],
        default="peft",
        help="for Hugging Face PEFT (default), for adapters, or a plain checkpoint",
    )
    _add_client_options(export, "an export of each of these clients (or of all) in a folder")
    export.add_argument("--out", type=Path, required=True, metavar="DIR")
    export.add_argument("--overwrite", action="store_true", help="replace another export in DIR")

    predict = command(
        _predict,
        'predict for lines such as {"text": ...}, {"tokens": [...]} or {"question": ...,'
        ' "context": ...}, as the run\'s task needs them',
    )
    predict.add_argument("run", type=Path, metavar="RUN")
    predict.add_argument("--input", type=Path, required=True, metavar="FILE.jsonl")
    predict.add_argument(
        "--output", type=Path, required=True, metavar="FILE.jsonl", help="with --clients a folder"
    )
    _add_client_options(predict, "a file for each of these clients (or for all) in a folder")

    shares = command(_partition, "show how a config shares out its data, without training")
    shares.add_argument("config", type=Path, metavar="CONFIG.toml")
    _add_overrides(shares)
    shares.add_argument(
        "--out", type=Path, metavar="DIR", help="default: runs/<config's name>-partition"
    )
    shares.add_argument("--by", metavar="KEY", help="classes; default: the partition's, or labels")
    shares.add_argument(
        "--measure",
        choices=["js", "js_sqrt", "jeffreys"],
        default="js",
        help="of how far clients are apart: Jensen-Shannon (default), its root, or Jeffreys / 2",
    )
    shares.add_argument(
        "--base", choices=["2", "e", "10"], default="2", help="of Jensen-Shannon's logarithm"
    )

    bench = command(_bench, "time the local-update engine on random data")
    _add_overrides(bench)
    bench.add_argument("--json", action="store_true", help="print one JSON object")

    fetch = command(_assets, "list or fetch the demo's model and data")
    fetch.add_argument("name", nargs="?", metavar="NAME")

    shell = command(_completion, "print a script for your shell, which then completes with Tab")
    shell.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    shell.epilog = 'bash: eval "$(fedjax-peft completion bash)" in ~/.bashrc'

    names = command(_list, "list what a config can name, and what it means")
    names.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="models, backbones, data, partitions, peft, algorithms, aggregators, optimizers,"
        " transforms, systems or keys, and perhaps a name (list algorithm ditto) or a part of one"
        " (list keys rate); or any part of a name or description",
    )
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="replaces a config key; key= takes it out"
    )


def _add_client_options(parser: argparse.ArgumentParser, several: str) -> None:
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--client", type=int, metavar="N", help="use this client's model, not the global one"
    )
    chosen.add_argument("--clients", metavar="0,3,7|all", help=several)


def _add_verbosity(parser: argparse.ArgumentParser) -> None:
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "-q", "--quiet", action="store_true", help="show nothing but the final table"
    )
    amount.add_argument(
        "-v", "--verbose", action="store_true", help="show every phase and how long it took"
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/<config's name>")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show the complete config and what a round costs, and stop before training",
    )
    _add_verbosity(parser)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue an interrupted run")
    existing.add_argument("--overwrite", action="store_true", help="replace an existing run")


# --------------------------------------------------------------------------------------- commands


def _run(options: argparse.Namespace) -> None:
    path, out = options.config, Path("runs") / options.config.stem
    if options.resume and path.name == "config.toml" and (path.parent / "metrics.jsonl").exists():
        out = path.parent  # the config of a run: continue that run, where it is
    _run_file(path, options, default_out=out)


def _resume(options: argparse.Namespace) -> None:
    _prepare_jax()
    from fedjax_peft.cli import resuming
    from fedjax_peft.config import config as configs

    stored = resuming.stored_configs(options.run)
    todo = configs.methods({"methods": stored}, options.overrides)
    # A name that only stands for the folder is not a part of the config.
    todo = {name: {**one, "name": stored[name].get("name")} for name, one in todo.items()}
    resolved = {name: configs.resolve_recorded(one) for name, one in todo.items()}
    if all(resuming.is_finished(options.run / n, one["rounds"]) for n, one in resolved.items()):
        rounds = max(one["rounds"] for one in resolved.values())
        print(
            f"There is nothing left to resume: {options.run} has made all of its {rounds} rounds."
            f" For more of them: {resuming.command(options.run)} rounds={2 * rounds}"
        )
        return
    _run_all(resolved, options, options.run, options.run.resolve().name)


def _init(options: argparse.Namespace) -> None:
    from fedjax_peft.cli.init import write_project

    project = write_project(
        options.directory, data=options.data, text=options.text, label=options.label
    )
    print(*project.files, sep="\n")
    print(display.one_line(f"Texts are in {project.text!r}, labels in {project.label!r}."))
    config = options.directory / "config.toml"
    out = Path("runs") / options.directory.absolute().name
    print(f"Next: fedjax-peft run {shlex.quote(str(config))} --out {shlex.quote(str(out))}")


def _demo(options: argparse.Namespace) -> None:
    if not options.resume:  # a demo may always start again
        options.overwrite = True
    out = options.out or Path("runs/demo")
    config = Path(__file__).with_name("demo.toml")
    records = _run_file(config, options, default_out=out)
    if options.dry_run:
        return
    from fedjax_peft.report import page as report

    page = report.write_report(records, out)
    first = out / records[0].path.name
    print(f"\nCurves and details: {page}\nNext, use what was learned:")
    print(f"  fedjax-peft export {first} --format peft --out adapter")
    print("Or change something and compare:")
    again = out.with_name(f"{out.name}-seed1")
    print(f"  fedjax-peft demo seed=1 --out {again} && fedjax-peft report {out} {again} --out runs")


def _run_file(path: Path, options: argparse.Namespace, default_out: Path) -> list["RunRecord"]:
    """Runs every method of a config file and prints the table."""
    _prepare_jax()
    from fedjax_peft.cli import resuming
    from fedjax_peft.config import config as configs
    from fedjax_peft.config import presets

    out = options.out or default_out
    # All are checked before the first one runs.
    raw = configs.methods(configs.load(path), options.overrides)
    only = getattr(options, "only", [])
    for name in only:
        if name not in raw:
            raise InputError(f"{path} has no [methods.{name}]. {nearest(name, raw)}")
    raw = {name: one for name, one in raw.items() if name in only or not only}
    todo = {name: configs.resolve(one) for name, one in raw.items()}
    if options.quiet <= options.verbose:
        for name, config in todo.items():
            title = config["name"] or name or path.stem
            for line in presets.notices(raw[name], config):
                print(display.one_line(f"fedjax-peft: {title}: {line}"), file=sys.stderr)
    if options.resume and not options.dry_run:
        resuming.check_resumable(out, todo)
    return _run_all(todo, options, out, path.stem)


def _run_all(
    todo: dict[str, dict[str, Any]], options: argparse.Namespace, out: Path, title: str
) -> list["RunRecord"]:
    """Runs resolved configs by name, prints the table and returns the records.

    Args:
      todo: the configs; the directory of each is ``out`` / name.
      options: of ``run``.
      out: where they go.
      title: what a run without a name is called.
    """
    from fedjax_peft.cli import console, resuming
    from fedjax_peft.config import config as configs
    from fedjax_peft.simulation import record

    titles = {name: config["name"] or name or title for name, config in todo.items()}
    if options.dry_run:
        for name, config in todo.items():
            print(*map(display.printable, record.config_text(config).split("\n")), sep="\n")
            show = console.dry_run(titles[name], configs.describe(config), print)
            with contextlib.suppress(console.DryRun):
                configs.run(config, on_phase=show)
        return []
    if options.overwrite:
        for name in todo:
            record.remove_run(out / name)
    resuming.note_methods(out, todo)
    try:
        return _run_each(todo, titles, options, out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Continue with: {resuming.command(out)}") from None


def _run_each(
    todo: dict[str, dict[str, Any]],
    titles: dict[str, str],
    options: argparse.Namespace,
    out: Path,
) -> list["RunRecord"]:
    """Runs resolved configs one after the other under their titles; see :func:`_run_all`."""
    from fedjax_peft.cli import console
    from fedjax_peft.config import config as configs
    from fedjax_peft.report.records import load_run

    done = []
    for name, config in todo.items():
        with console.screen(
            titles[name],
            configs.describe(config),
            config["rounds"],
            out / name / "metrics.jsonl",
            verbosity=options.verbose - options.quiet,
        ) as screen:
            configs.run(
                config,
                out=out / name,
                resume=options.resume,
                on_round=screen.on_round,
                on_phase=screen.on_phase,
            )
        done.append(load_run(out / name))
    _print_table(done)
    return done


def _report(options: argparse.Namespace) -> None:
    from rich.console import Console

    from fedjax_peft.report import page as report
    from fedjax_peft.report.records import load_runs

    runs = [run for path in options.runs for run in load_runs(path)]
    _print_table(runs)
    common = Path(os.path.commonpath([path.resolve() for path in options.runs]))
    page = report.write_report(runs, options.out or common, target=options.target)
    if options.target is not None:
        console = Console()
        targets = report.target_table(runs, options.target, console.width)
        console.print("", targets, sep="\n")
    print(page)


def _print_table(runs: "list[RunRecord]") -> None:
    """Prints the comparison of runs, and what their scores say."""
    from rich.console import Console

    from fedjax_peft.report import page as report

    console = Console()
    console.print(report.table(runs, console.width))
    if len(runs) > 1:
        console.print("", report.conclusion(runs), sep="\n", markup=False, highlight=False)


def _export(options: argparse.Namespace) -> None:
    _prepare_jax()
    from fedjax_peft.peft.io import export as exporting
    from fedjax_peft.peft.io.describe import describe

    models = _models(options)
    how = {"format": options.format, "overwrite": options.overwrite}
    if options.clients is None:
        params = models.params(options.client)
        first = out = exporting.export(models.model, params, options.out, **how)
    else:
        clients = ((c, models.params(c)) for c in models.chosen)
        out = exporting.export_clients(models.model, clients, options.out, **how)
        first = exporting.client_directory(out, models.chosen[0])
    print(f"{out}\n{describe(models.model, first, options.format)}")
    _print_note(models)


def _predict(options: argparse.Namespace) -> None:
    _prepare_jax()
    from fedjax_peft import inference, loading
    from fedjax_peft.simulation import record

    check_output(options.output)  # before all the work whose result goes there
    task, length = loading.inputs_of(options.run, record.read_config(options.run))
    rows = inference.read_inputs(options.input, task)
    models = _models(options)
    wanted: list[int | None] = [*models.chosen] or [None]
    for client in wanted:
        params = models.params(client)
        answers = inference.answer(models.model, params, rows, task=task, max_length=length or 128)
        lines = "".join(f"{json.dumps(line)}\n" for line in answers)
        output = options.output
        if options.clients is not None:
            output.mkdir(parents=True, exist_ok=True)
            output = output / f"client_{client:04d}.jsonl"
        replace_file(output, lines.encode())
    _print_note(models)


def _models(options: argparse.Namespace) -> "TrainedModels":
    """Returns the models of a run that the options choose."""
    from fedjax_peft.loading import load_models
    from fedjax_peft.simulation.client_models import check_format

    clients = options.clients if options.client is None else [options.client]
    models = load_models(options.run, clients)
    if hasattr(options, "format"):
        check_format(options.format, moved=models.algorithm.server.frozen_delta is not None)
    return models


def _print_note(models: "TrainedModels") -> None:
    if models.note:
        print(f"fedjax-peft: {models.note}", file=sys.stderr)


def _partition(options: argparse.Namespace) -> None:
    _prepare_jax()
    from rich.console import Console

    from fedjax_peft.config import config as configs
    from fedjax_peft.report import partition as reporting

    out = options.out or Path("runs") / f"{options.config.stem}-partition"
    raw = configs.methods(configs.load(options.config), options.overrides)
    todo = reporting.different({name: configs.resolve(one) for name, one in raw.items()})
    for name, config in todo.items():
        _, clients = configs.federation(config)
        report = reporting.inspect(
            clients,
            reporting.title(config),
            by=options.by or reporting.classes_key(config),
            measure=options.measure,
            base=math.e if options.base == "e" else float(options.base),
        )
        Console().print(reporting.size_table(report), "", reporting.class_table(report), sep="\n")
        for path in reporting.write(report, out / name if len(todo) > 1 else out):
            print(path)


def _bench(options: argparse.Namespace) -> None:
    _prepare_jax(cache=False)  # or compile_s would tell the time of a look-up
    from fedjax_peft.cli import bench as benching
    from fedjax_peft.cli import console
    from fedjax_peft.config import config as configs

    given: dict[str, Any] = {}
    for text in options.overrides:
        given = configs.override(given, text)
    chosen = configs.check_arguments(benching.bench, given)
    with console.signs_of_life("bench") as begin:
        result = benching.bench(**chosen, on_phase=begin)
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        if key != "shape":
            print(f"{key:20} {value:,.4g}" if isinstance(value, float) else f"{key:20} {value}")


def _assets(options: argparse.Namespace) -> None:
    if options.name is not None:
        print(assets.fetch(options.name))
        return
    for name, asset in assets.ASSETS.items():
        state = "fetched" if assets.is_cached(name) else "not fetched"
        print(f"{name:14} {state:12} {asset.description} ({asset.licence})")
    print(f"Kept in {assets.cache_dir()} (set FEDJAX_PEFT_CACHE to change it).")


def _list(options: argparse.Namespace) -> None:
    from fedjax_peft.cli.listing import listing
    from fedjax_peft.config import config as configs
    from fedjax_peft.config import presets
    from fedjax_peft.data.sources import DATASETS
    from fedjax_peft.models import registry

    sections = {
        "models": {
            **{name: a.description for name, a in assets.ASSETS.items() if a.kind == "model"},
            "(a checkpoint)": "of a backbone below, by hub id or path (config.json + safetensors)",
        },
        "backbones (model_type) and their heads": {
            name: ", ".join(family.kinds) for name, family in registry.FAMILIES.items()
        },
        f"data sets (from source = DIR or {assets.cache_dir() / 'data'}/NAME, else as it says)": {
            **{name: _data_lines(source) for name, source in DATASETS.items()},
            "(a directory)": "of json, csv or parquet files, images, or LEAF's json by user",
        },
        **{table: _first_lines(module) for table, module in configs.NAMESPACES.items()},
        "systems (system = ...), and the keys that you choose": presets.lines(),
    }
    print(listing(sections, options.words))


def _completion(options: argparse.Namespace) -> None:
    from fedjax_peft.cli.completion import script

    print(script(_parser(), options.shell))


def _data_lines(source: "Source") -> str:
    """Returns what a data set is, and what is needed to get it."""
    if source.parts:
        ways = [f"the data sets {', '.join(source.parts)}"]
        return "\n".join([source.description, *ways, *_paper_line(source)])
    ways = ["from PyPI"] if source.asset else []
    ways += [f"from the hub, {source.hub}"] if source.hub else []
    ways += [f"by hand: {source.download}"]
    return "\n".join([source.description, *ways, *_paper_line(source)])


def _paper_line(source: "Source") -> list[str]:
    """Returns a line about what ``partition = "paper"`` is for a data set, or none."""
    settings = source.settings
    if settings.partition is None:
        return []
    options = {k: v for k, v in settings.partition.items() if k != "name"}
    said = ", ".join(f"{key} = {value}" for key, value in options.items())
    return [
        f'partition = "paper": {settings.partition["name"]} ({said}),'
        f" {settings.clients_per_round} clients a round, {settings.rounds} rounds"
        f" ({settings.paper})"
    ]


def _first_lines(module: Any) -> dict[str, str]:
    documents = {name: getattr(module, name).__doc__ or "" for name in module.__all__}
    return {name: text.strip().split("\n")[0] for name, text in documents.items()}


def _prepare_jax(*, cache: bool = True) -> None:
    """Sets up the process: compiled programs are kept, so that a second start is quick."""
    faults.check_limits()
    import jax

    from fedjax_peft.engine.compilation import use_compilation_cache

    if cache:
        use_compilation_cache()
    else:
        jax.config.update("jax_enable_compilation_cache", False)


if __name__ == "__main__":
    sys.exit(main())
