"""The commands of ``fedjax-peft`` and their options."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from fedjax_peft import __version__
from fedjax_peft.cli import plan, results, running, sweeping, tools
from fedjax_peft.support import display

_RUN_HELP = """\
a config is a TOML file; every key can be replaced on the command line:
  fedjax-peft run my.toml rounds=20 peft.rank=8 algorithm=fedprox --out runs/mine

how to write a config and find its keys:
  fedjax-peft init mine                write a commented config for your own data, ready to run
  fedjax-peft list                     an overview of models, data sets, algorithms and other names
  fedjax-peft list algorithm ditto     describe an algorithm and its keys
  fedjax-peft list keys rate           list all keys that concern "rate"
  fedjax-peft explain peft.rank        explain one key: meaning, type and default
"""

_SWEEP_HELP = """\
give a key several values, on the command line or in the config's [sweep.grid]:
  fedjax-peft sweep my.toml seed=0..4 optimizer.learning_rate=1e-3,3e-3,1e-2 --out runs/lr
  fedjax-peft report runs/lr    means and deviations over seeds, and the best setting

every point is an ordinary run in its own directory; --resume runs those that are missing
"""


class _ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors show arguments shortened and without terminal escapes."""

    def error(self, message: str) -> NoReturn:
        super().error(display.paragraph(message))


class _Explain(argparse.Action):
    """Prints the answer to ``--explain KEY`` and exits, as ``--help`` does; no config is needed."""

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


def _option(parser: Any, name: str, metavar: str, text: str, **more: Any) -> None:
    """Adds an argument with a value."""
    parser.add_argument(name, metavar=metavar, help=text, **more)


def _flag(parser: Any, name: str, text: str) -> None:
    """Adds an option without a value."""
    parser.add_argument(name, action="store_true", help=text)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; each command's function is in ``options.command``."""
    parser = _ArgumentParser(
        prog="fedjax-peft",
        description="Simulate federated parameter-efficient fine-tuning of transformers.",
    )
    parser.add_argument("--version", action="version", version=f"fedjax_peft {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Callable[[argparse.Namespace], None], text: str) -> Any:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=function, parser=added)
        return added

    _add_running(command)
    _add_results(command)
    _add_sync(command)
    _add_trained(command)
    _add_tools(command, parser)
    return parser


def _add_running(command: Callable[..., Any]) -> None:
    run = command("run", running.run, "run a config file")
    run.epilog = _RUN_HELP
    run.formatter_class = argparse.RawDescriptionHelpFormatter
    run.add_argument("config", type=Path, metavar="CONFIG.toml")
    _option(run, "--explain", "KEY", "as the command explain", action=_Explain)
    _option(run, "--only", "NAME", "run only this [methods.NAME]", action="append", default=[])
    run.add_argument(
        "--from",
        dest="origin",
        type=Path,
        metavar="RUN",
        help="start a new run from the model of RUN and what its clients keep",
    )
    _add_overrides(run)
    _add_run_options(run)
    _add_distributed(run)

    _add_sweep(command)

    resume = command("resume", running.resume, "continue an interrupted run")
    _option(resume, "run", "RUN", "a run, the runs of several methods, or a sweep", type=Path)
    _option(resume, "overrides", "rounds=N", "more rounds than first planned", nargs="*")
    _add_verbosity(resume)
    _add_distributed(resume)
    resume.set_defaults(resume=True, overwrite=False, dry_run=False)

    demo = command(
        "demo", running.demo, "compare seven runs on real data; four minutes on two CPU cores"
    )
    _add_overrides(demo)
    _add_run_options(demo)


def _add_sweep(command: Callable[..., Any]) -> None:
    sweep = command("sweep", sweeping.sweep, "run a config for several seeds and settings")
    sweep.epilog = _SWEEP_HELP
    sweep.formatter_class = argparse.RawDescriptionHelpFormatter
    sweep.add_argument("config", type=Path, metavar="CONFIG.toml")
    _option(sweep, "--only", "NAME", "run only this [methods.NAME]", action="append", default=[])
    sweep.add_argument(
        "--early-stop",
        action="store_true",
        help="end a run whose best value is worse than the median of the finished runs",
    )
    sweep.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="runs side by side in one program; default: 8 on an accelerator, 1 on a CPU",
    )
    _add_overrides(sweep)
    _add_run_options(sweep)


def _add_results(command: Callable[..., Any]) -> None:
    report = command(
        "report", results.report, "compare runs, or a sweep: tables, report.html and curves"
    )
    _option(report, "runs", "RUN", "or a sweep, or a folder of runs", nargs="+", type=Path)
    _option(report, "--out", "DIR", "default: beside the runs", type=Path)
    report.add_argument(
        "--target",
        type=float,
        metavar="0.8",
        help="also show the cost of reaching 90, 95 and 99 %% of this test score",
    )
    report.add_argument(
        "--metric",
        metavar="NAME",
        help="compare by this field of metrics.jsonl, such as client_accuracy_mean or time.train_s",
    )
    report.add_argument(
        "--x",
        choices=["round", "bytes", "simulated_seconds", "wall_seconds"],
        help="draw the curves against this axis alone; default: the page has a choice",
    )
    report.add_argument(
        "--smooth",
        type=int,
        default=1,
        metavar="W",
        help="draw rolling means over W evaluated rounds; the captions say so",
    )
    report.add_argument(
        "--at",
        choices=["final", "best", "mean"],
        default="final",
        help="the metric's last value (default), its best, or the mean of all after round 0",
    )
    report.add_argument(
        "--choose-by",
        metavar="NAME",
        help="the metric that chooses each method's setting; default: the sweep's, on validation",
    )
    report.add_argument(
        "--baseline",
        metavar="METHOD",
        help="the method that the others are compared with; default: the sweep's, or the first",
    )
    _flag(report, "--watch", "show the page in a browser while the runs go on; writes nothing")
    report.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="N",
        help="the port of --watch on this machine; default: a free one",
    )
    report.add_argument(
        "--detect",
        type=float,
        metavar="0.01",
        help="say how many seeds a difference of this size needs; default: 0.01 of a fraction",
    )


def _add_sync(command: Callable[..., Any]) -> None:
    sync = command("sync", results.sync, "send the rows that trackers have missed")
    _option(sync, "run", "RUN", "a run, a sweep, or a folder of runs", type=Path)
    names = "trackers=mlflow"
    _option(sync, "overrides", names, "another tracker than the runs' configs name", nargs="*")


def _add_trained(command: Callable[..., Any]) -> None:
    export = command("export", results.export, "write a run's adapter and head, or merged model")
    export.add_argument("run", type=Path, metavar="RUN")
    export.add_argument(
        "--format",
        choices=["peft", "adapterhub", "merged", "hub"],
        default="peft",
        help="for Hugging Face PEFT (default), for AdapterHub's adapters, a plain checkpoint, or"
        " for the Hugging Face hub: an adapter, a model card made from the run, and its config",
    )
    _add_client_options(export, "one export for each of these clients (or all), in a folder")
    export.add_argument("--out", type=Path, required=True, metavar="DIR")
    _flag(export, "--overwrite", "replace another export in DIR")
    hub = export.add_argument_group("for --format hub")
    _flag(hub, "--merged", "also write the merged model, into DIR/merged")
    _option(hub, "--license", "ID", "of the adapter, such as apache-2.0")
    _option(hub, "--base-model", "ID", "of the base model on the hub; default: its name here")
    _option(hub, "--push", "USER/NAME", "upload it to this repository of the hub")
    _flag(hub, "--private", "make a repository that others do not see")

    predict = command(
        "predict",
        results.predict,
        'predict for lines such as {"text": ...}, {"tokens": [...]}, {"question": ...,'
        ' "context": ...} or {"prompt": ...}, depending on the run\'s task',
    )
    predict.add_argument("run", type=Path, metavar="RUN")
    predict.add_argument("--input", type=Path, required=True, metavar="FILE.jsonl")
    predict.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="the file to write; with --clients a folder",
    )
    predict.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="of a language model: most tokens of a completion; by default as the run's task says",
    )
    _option(predict, "--temperature", "T", "likewise: 0 takes the most likely tokens", type=float)
    _option(predict, "--top-p", "P", "likewise: nucleus sampling", type=float)
    _add_client_options(predict, "one file for each of these clients (or all), in a folder")


def _add_tools(command: Callable[..., Any], parser: argparse.ArgumentParser) -> None:
    init = command("init", tools.init, "write a commented config for your own data, ready to run")
    init.add_argument("directory", type=Path, metavar="DIR")
    _option(init, "--data", "FILE", "your table; by default a small sample is made", type=Path)
    _option(init, "--text", "COLUMN", "column of the texts; default: guessed")
    _option(init, "--label", "COLUMN", "column of the labels; default: guessed")
    _option(init, "--sep", "';'", "between the fields of a csv file; default: ,")
    _option(init, "--encoding", "cp1252", "of a csv file; default: utf-8")
    init.add_argument(
        "--no-header",
        dest="header",
        action="store_const",
        const=False,
        help="the csv file's first row is data; its columns are column_1, column_2, ...",
    )

    configs = command("config", tools.upgrade, "rewrite configs of an earlier version")
    configs.add_argument("action", choices=["upgrade"])
    _option(configs, "files", "FILE", "config files", nargs="+", type=Path)

    _add_partition(command)
    _add_plan(command)
    _add_privacy(command)

    bench = command("bench", tools.bench, "time the local-update engine on random data")
    _add_overrides(bench)
    _flag(bench, "--json", "print one JSON object")

    fetch = command("assets", tools.list_assets, "list or fetch the demo's model and data")
    fetch.add_argument("name", nargs="?", metavar="NAME")

    shell = command(
        "completion", tools.completion, "print a script for your shell that completes with Tab"
    )
    shell.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    shell.epilog = 'bash: eval "$(fedjax-peft completion bash)" in ~/.bashrc'
    shell.set_defaults(root=parser)

    doctor = "print versions, devices, caches, memory and extras, for a bug report"
    command("doctor", tools.doctor, doctor)

    key = command("explain", tools.explain, "explain a config key: meaning, type and default")
    _option(key, "key", "KEY", "such as peft.rank, rank, algorithm or peft.lora")

    names = command("list", tools.list_names, "list the names that a config can use")
    names.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="nothing for an overview; or models, backbones, data, partitions, peft, algorithms,"
        " aggregators, optimizers, transforms, privacy, attacks, asynchronous, availability,"
        " presets, devices or keys, optionally with a name (list algorithm ditto) or a part of one"
        " (list keys rate); or any part of a name or description",
    )


def _add_partition(command: Callable[..., Any]) -> None:
    shares = command(
        "partition", tools.partition, "show how a config partitions its data, without training"
    )
    shares.add_argument("config", type=Path, metavar="CONFIG.toml")
    _add_overrides(shares)
    _option(shares, "--out", "DIR", "default: runs/<config's name>-partition", type=Path)
    _option(shares, "--by", "KEY", "key of the classes; default: the partition's, or the labels")
    shares.add_argument(
        "--measure",
        choices=["js", "js_sqrt", "jeffreys"],
        default="js",
        help="distance between clients: Jensen-Shannon (default), its root, or Jeffreys / 2",
    )
    shares.add_argument(
        "--base",
        choices=["2", "e", "10"],
        default="2",
        help="base of the logarithm in Jensen-Shannon",
    )


def _add_plan(command: Callable[..., Any]) -> None:
    memory = command("plan", plan.plan, "compute the memory that a config needs, and its lanes")
    memory.epilog = "fedjax-peft plan my.toml model.quantize=nf4 --memory 24GB --lanes 8"
    memory.add_argument("config", type=Path, metavar="CONFIG.toml")
    _add_overrides(memory)
    _option(memory, "--memory", "24GB", "of the device: say whether it fits")
    _option(memory, "--device", "h100", "the same, and the least time of a round; list devices")
    _option(memory, "--lanes", "N", "default: the config's, or 1", type=int)
    _flag(
        memory,
        "--compile",
        "also ask the compiler of the device, or of the one here; takes minutes",
    )


def _add_privacy(command: Callable[..., Any]) -> None:
    noise = command(
        "privacy", tools.privacy, "compute the noise that an epsilon needs, or the epsilon of noise"
    )
    noise.epilog = (
        "fedjax-peft privacy --epsilon 2 --delta 1e-5 --rounds 100 --clients 10000 --per-round 100"
    )
    asked = noise.add_mutually_exclusive_group(required=True)
    _option(asked, "--epsilon", "E", "compute the noise multiplier", type=float)
    _option(asked, "--noise-multiplier", "Z", "compute the epsilon of this noise", type=float)
    _option(noise, "--delta", "D", "default: 1e-5", type=float, default=1e-5)
    noise.add_argument("--rounds", type=int, required=True, metavar="T")
    _option(noise, "--clients", "N", "clients in the federation", type=int)
    _option(noise, "--per-round", "S", "clients in a round", type=int)
    noise.add_argument(
        "--sampling",
        choices=["poisson", "uniform", "round_robin", "all", "shuffled"],
        default="poisson",
        help="how clients are drawn; examples: poisson or shuffled; default: poisson",
    )
    noise.add_argument(
        "--neighbours",
        choices=["add_or_remove_one", "replace_special", "replace_one"],
        help="what the guarantee compares; default: what suits the sampling",
    )
    noise.add_argument(
        "--unit",
        choices=["client", "example"],
        default="client",
        help="whose data is protected: a client's (default), or one example's in local steps",
    )
    _option(noise, "--examples", "N", "of the smallest client, for --unit example", type=int)
    _option(noise, "--batch-size", "B", "likewise", type=int)
    _option(noise, "--steps", "K", "local steps in a round, likewise", type=int, default=1)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    _option(parser, "overrides", "key=value", "replaces a config key; key= removes it", nargs="*")


def _add_client_options(parser: argparse.ArgumentParser, several: str) -> None:
    chosen = parser.add_mutually_exclusive_group()
    _option(chosen, "--client", "N", "use this client's model, not the global one", type=int)
    _option(chosen, "--clients", "0,3,7|all", several)


def _add_verbosity(parser: argparse.ArgumentParser) -> None:
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("-q", "--quiet", action="store_true", help="show only the final table")
    amount.add_argument(
        "-v", "--verbose", action="store_true", help="show every phase and its duration"
    )


def _add_distributed(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes", "one command in every process; JAX finds the others in a cluster"
    )
    _flag(group, "--distributed", "share the run with other processes")
    _option(group, "--coordinator", "HOST:PORT", "where process 0 listens")
    _option(group, "--processes", "N", "the number of processes", type=int)
    _option(group, "--process", "I", "this process, from 0", type=int)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    _option(parser, "--out", "DIR", "default: runs/<config's name>", type=Path)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show the complete config and the cost of a round, and stop before training",
    )
    _add_verbosity(parser)
    existing = parser.add_mutually_exclusive_group()
    _flag(existing, "--resume", "continue an interrupted run, or begin it")
    _flag(existing, "--overwrite", "replace an existing run")
