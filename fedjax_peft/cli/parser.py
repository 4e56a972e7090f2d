"""The commands of ``fedjax-peft`` and their options.

A command names its function as ``module.function`` of this room. The module is imported when the
command runs, so that ``--help`` answers at once.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from fedjax_peft.support import display
from fedjax_peft.support.version import __version__

WITHOUT_JAX = ("init", "listing", "reproduce")
"""Modules of commands that do without JAX."""

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

_REPRODUCE_HELP = """\
  fedjax-peft reproduce                        list all tables and figures, with hours and state
  fedjax-peft reproduce fra figure7 --small    BERT-tiny, for a CPU; without --small the paper's
                                               setting, for a GPU
  fedjax-peft reproduce federa 2 --data DIR    Table 2 of FeDeRA, with the data sets in DIR

the same command continues what was interrupted
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


_PATH, _INT, _FLOAT = {"type": Path}, {"type": int}, {"type": float}
_REQUIRED = {"type": Path, "required": True}
_ANY, _SOME = {"nargs": "*"}, {"nargs": "+", "type": Path}
_CONFIG = ("config", "CONFIG.toml", None, _PATH)
_OVERRIDES = ("overrides", "key=value", "replaces a config key; key= removes it", _ANY)
_ONLY = ("--only", "A,B", "run only these [methods.NAME]", {"action": "append", "default": []})
_RUN_OUT = ("--out", "DIR", "default: runs/<config's name>", _PATH)
_VERBOSITY = {
    "-q --quiet": "show only the final table",
    "-v --verbose": "show every phase and its duration",
}
_EXISTING = {
    "--resume": "continue an interrupted run, or begin it",
    "--overwrite": "replace an existing run",
}


def _options(parser: Any, *rows: tuple[Any, ...]) -> None:
    """Adds arguments: each row is a name, a metavar, a help text and settings of argparse."""
    for name, metavar, text, *more in rows:
        settings = more[0] if more else {}
        parser.add_argument(name, metavar=metavar, help=text, **settings)


def _flags(parser: Any, texts: dict[str, str]) -> None:
    """Adds options without a value: names -> help text."""
    for names, text in texts.items():
        parser.add_argument(*names.split(), action="store_true", help=text)


def _choice(parser: Any, name: str, choices: str, text: str, default: str | None = None) -> None:
    """Adds an option with one of several values, which stand in a text with spaces."""
    parser.add_argument(name, choices=choices.split(), default=default, help=text)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; ``options.command`` names each command's function."""
    parser = _ArgumentParser(
        prog="fedjax-peft",
        description="Simulate federated parameter-efficient fine-tuning of transformers.",
    )
    parser.add_argument("--version", action="version", version=f"fedjax_peft {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: str, text: str, epilog: str = "") -> Any:
        added = commands.add_parser(name, help=text, description=text, epilog=epilog)
        if "\n" in epilog:
            added.formatter_class = argparse.RawDescriptionHelpFormatter
        added.set_defaults(command=function, parser=added)
        return added

    _add_running(command)
    _add_report(command)
    _add_trained(command)
    _add_init(command)
    _add_deploy(command)
    _add_planning(command)
    _add_names(command, parser)
    return parser


def _add_running(command: Callable[..., Any]) -> None:
    run = command("run", "running.run", "run a config file", _RUN_HELP)
    _options(
        run,
        _CONFIG,
        ("--explain", "KEY", "as the command explain", {"action": _Explain}),
        _ONLY,
        (
            "--from",
            "RUN",
            "start a new run from the model of RUN and what its clients keep",
            {"dest": "origin", **_PATH},
        ),
    )
    _add_run_options(run)
    _add_distributed(run)

    sweep = command(
        "sweep", "sweeping.sweep", "run a config for several seeds and settings", _SWEEP_HELP
    )
    early = "end a run whose best value is worse than the median of the finished runs"
    replicas = "runs side by side in one program; default: 8 on an accelerator, 1 on a CPU"
    _options(sweep, _CONFIG, _ONLY, ("--replicas", "N", replicas, _INT))
    _flags(sweep, {"--early-stop": early})
    _add_run_options(sweep)
    submit = "start workers where the config's [executor] says, and return"
    _flags(_add_workers(sweep), {"--submit": submit})

    resume = command("resume", "running.resume", "continue an interrupted run")
    _options(
        resume,
        ("run", "RUN", "a run, the runs of several methods, or a sweep", _PATH),
        ("overrides", "rounds=N", "more rounds than first planned", _ANY),
    )
    _flags(resume.add_mutually_exclusive_group(), _VERBOSITY)
    _add_distributed(resume)
    _add_workers(resume)
    resume.set_defaults(resume=True, overwrite=False, dry_run=False)

    text = "run what a table or figure of a paper needs, and write it beside the printed one"
    again = command("reproduce", "reproduce.reproduce", text, _REPRODUCE_HELP)
    words = "PAPER and TABLE or FIGURE, such as federa 2; key=value replaces a key of the configs"
    _options(
        again,
        ("words", "WORD", words, _ANY),
        ("--data", "DIR", "a folder with a folder for each data set; default: the hub", _PATH),
        ("--model", "NAME", "a model or its folder, in place of the configs' model"),
        ("--out", "DIR", "default: runs/reproduce/PAPER/paper or .../small", _PATH),
    )
    small = "the small setting, for a CPU; default: the paper's setting, for a GPU"
    dry = "show the hours and the places of the results, and stop"
    _flags(again, {"--small": small, "--dry-run --hours": dry, "-q --quiet": "show less"})
    again.set_defaults(overrides=[])

    text = "compare seven runs on real data; about 5 minutes on two CPU cores"
    _add_run_options(command("demo", "demo.demo", text))


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    dry = "show the complete config and the cost of a round, and stop before training"
    _options(parser, _OVERRIDES, _RUN_OUT)
    _flags(parser, {"--dry-run": dry})
    _flags(parser.add_mutually_exclusive_group(), _VERBOSITY)
    _flags(parser.add_mutually_exclusive_group(), _EXISTING)


def _add_deploy(command: Callable[..., Any]) -> None:
    text = "write an app that runs a config with real clients, through Flower"
    deploy = command("deploy", "deploying.deploy", text)
    _options(deploy, _CONFIG, _OVERRIDES, _ONLY, ("--out", "DIR", "the folder to write", _REQUIRED))


def _add_distributed(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes", "one command in every process; JAX finds the others in a cluster"
    )
    _flags(group, {"--distributed": "share the run with other processes"})
    _options(
        group,
        ("--coordinator", "HOST:PORT", "where process 0 listens"),
        ("--processes", "N", "the number of processes", _INT),
        ("--process", "I", "this process, from 0", _INT),
    )


def _add_workers(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group(
        "workers of a study", "processes on any machines that see its directory share its points"
    )
    _flags(group, {"--share": "take the points that no other process has"})
    _options(
        group,
        ("--workers", "N", "start N workers on this machine, one for each GPU", _INT),
        ("--devices", "I,J", "of a worker: the GPUs of this machine that it uses, from 0"),
        (
            "--take-over",
            "AGE",
            "take points of other machines that gave no sign of life for so long, such as 1h",
        ),
    )
    return group


def _add_report(command: Callable[..., Any]) -> None:
    text = "compare runs, or a sweep: tables, report.html and curves"
    report = command("report", "results.report", text)
    cost = "also show the cost of reaching 90, 95 and 99 %% of this test score"
    field = "compare by this field of metrics.jsonl, such as client_accuracy_mean or time.train_s"
    smooth = "draw rolling means over W evaluated rounds; the captions say so"
    chooses = "the metric that chooses each method's setting; default: the sweep's, on validation"
    baseline = "the method that the others are compared with; default: the sweep's, or the first"
    needs = "say how many seeds a difference of this size needs; default: 0.01 of a fraction"
    port = "with --watch: show the page in a browser, at this port of this machine; 0: a free one"
    _options(
        report,
        ("runs", "RUN", "or a sweep, or a folder of runs", _SOME),
        ("--out", "DIR", "default: beside the runs", _PATH),
        ("--target", "0.8", cost, _FLOAT),
        ("--metric", "NAME", field),
        ("--smooth", "W", smooth, {**_INT, "default": 1}),
        ("--choose-by", "NAME", chooses),
        ("--baseline", "METHOD", baseline),
        ("--port", "N", port, _INT),
        ("--detect", "0.01", needs, _FLOAT),
    )
    watch = "show every point, and the tables so far, until all runs have ended; writes nothing"
    _flags(report, {"--watch": watch})
    axes = "round bytes simulated_seconds wall_seconds"
    text = "draw the curves against this axis alone; default: the page has a choice"
    _choice(report, "--x", axes, text)
    text = "the metric's last value (default), its best, or the mean of all after round 0"
    _choice(report, "--at", "final best mean", text, "final")

    status = command("status", "status.status", "show what has become of every point of a study")
    _options(status, ("study", "STUDY", "the directory of a sweep, or a folder of runs", _PATH))
    _flags(status, {"-q --quiet": "show only how many there are of each kind"})

    sync = command("sync", "results.sync", "send the rows that trackers have missed")
    _options(
        sync,
        ("run", "RUN", "a run, a sweep, or a folder of runs", _PATH),
        ("overrides", "trackers=mlflow", "another tracker than the runs' configs name", _ANY),
    )


def _add_trained(command: Callable[..., Any]) -> None:
    export = command("export", "trained.export", "write a run's adapter and head, or merged model")
    _options(
        export,
        ("run", "RUN", None, _PATH),
        ("--out", "DIR", None, _REQUIRED),
    )
    text = (
        "for Hugging Face PEFT (default), for AdapterHub's adapters, a plain checkpoint, or for the"
        " Hugging Face hub: an adapter, a model card made from the run, and its config"
    )
    _choice(export, "--format", "peft adapterhub merged hub", text, "peft")
    text = "of the weights of --format merged: bfloat16 halves the file, and rounds"
    _choice(export, "--dtype", "float32 bfloat16", text, "float32")
    _add_clients(export, "one export")
    _flags(export, {"--overwrite": "replace another export in DIR"})
    hub = export.add_argument_group("for --format hub")
    _options(
        hub,
        ("--license", "ID", "of the adapter, such as apache-2.0"),
        ("--base-model", "ID", "of the base model on the hub; default: its name here"),
        ("--push", "USER/NAME", "upload it to this repository of the hub"),
    )
    _flags(
        hub,
        {
            "--merged": "also write the merged model, into DIR/merged",
            "--private": "make a repository that others do not see",
        },
    )

    text = (
        'predict for lines such as {"text": ...}, {"tokens": [...]}, {"question": ..., "context":'
        ' ...} or {"prompt": ...}, depending on the run\'s task'
    )
    predict = command("predict", "trained.predict", text)
    tokens = "of a language model: most tokens of a completion; by default as the run's task says"
    _options(
        predict,
        ("run", "RUN", None, _PATH),
        ("--input", "FILE", "JSON lines, or another table that training reads", _REQUIRED),
        ("--output", "FILE.jsonl", "the file to write; with --clients a folder", _REQUIRED),
        ("--max-new-tokens", "N", tokens, _INT),
        ("--temperature", "T", "likewise: 0 takes the most likely tokens", _FLOAT),
        ("--top-p", "P", "likewise: nucleus sampling", _FLOAT),
    )
    _add_clients(predict, "one file")


def _add_clients(parser: Any, result: str) -> None:
    """Adds the options of a command that takes clients' models."""
    _options(
        parser.add_mutually_exclusive_group(),
        ("--client", "N|NAME", "use this client's model, not the global one"),
        ("--clients", "0,3,7|all", f"{result} for each of these clients (or all), in a folder"),
        ("--client-folder", "DIR", "the model of a real client, client-N in its state", _PATH),
    )


def _add_init(command: Callable[..., Any]) -> None:
    init = command("init", "init.init", "write a commented config for your own data, ready to run")
    header = "the csv file's first row is data; its columns are column_1, column_2, ..."
    _options(
        init,
        ("directory", "DIR", None, _PATH),
        ("--data", "FILE", "your table; by default a small sample is made", _PATH),
        ("--text", "COLUMN", "column of the texts; default: guessed"),
        ("--label", "COLUMN", "column of the labels; default: guessed"),
        ("--sep", "';'", "between the fields of a csv file; default: a comma, a tab in .tsv"),
        ("--quote", "'\"'", "around fields that hold separators; none: there is no such character"),
        ("--escape", "'\\'", "before a quotation mark that belongs to a text; default: none"),
        ("--encoding", "cp1252", "of a csv file; default: utf-8"),
    )
    init.add_argument("--no-header", dest="header", action="store_const", const=False, help=header)


def _add_planning(command: Callable[..., Any]) -> None:
    text = "show how a config partitions its data, without training"
    shares = command("partition", "partition.partition", text)
    _options(
        shares,
        _CONFIG,
        _OVERRIDES,
        ("--out", "DIR", "default: runs/<config's name>-partition", _PATH),
        ("--by", "KEY", "key of the classes; default: the partition's, or the labels"),
    )
    distance = "distance between clients: Jensen-Shannon (default), its root, or Jeffreys / 2"
    _choice(shares, "--measure", "js js_sqrt jeffreys", distance, "js")
    _choice(shares, "--base", "2 e 10", "base of the logarithm in Jensen-Shannon", "2")

    text = "compute the memory that a config needs, and its lanes"
    example = "fedjax-peft plan my.toml model.quantize=nf4 --memory 24GB --lanes 8"
    memory = command("plan", "plan.plan", text, example)
    _options(
        memory,
        _CONFIG,
        _OVERRIDES,
        ("--memory", "24GB", "of the device: say whether it fits"),
        ("--device", "h100", "the same, and the least time of a round; list devices"),
        ("--lanes", "N", "default: the config's, or 1", _INT),
        ("--workers", "N", "of the study: say when N such devices have done all its runs", _INT),
    )
    text = "also ask the compiler of the device, or of the one here; takes minutes"
    _flags(memory, {"--compile": text})

    text = "compute the noise that an epsilon needs, or the epsilon of noise"
    example = "--epsilon 2 --delta 1e-5 --rounds 100 --clients 10000 --per-round 100"
    noise = command("privacy", "privacy.privacy", text, f"fedjax-peft privacy {example}")
    _options(
        noise.add_mutually_exclusive_group(required=True),
        ("--epsilon", "E", "compute the noise multiplier", _FLOAT),
        ("--noise-multiplier", "Z", "compute the epsilon of this noise", _FLOAT),
    )
    _options(
        noise,
        ("--delta", "D", "default: 1e-5", {**_FLOAT, "default": 1e-5}),
        ("--rounds", "T", None, {**_INT, "required": True}),
        ("--clients", "N", "clients in the federation", _INT),
        ("--per-round", "S", "clients in a round", _INT),
        ("--examples", "N", "of the smallest client, for --unit example", _INT),
        ("--batch-size", "B", "likewise", _INT),
        ("--steps", "K", "local steps in a round, likewise", {**_INT, "default": 1}),
    )
    text = "how clients are drawn; examples: poisson or shuffled; default: poisson"
    _choice(noise, "--sampling", "poisson uniform round_robin all shuffled", text, "poisson")
    text = "what the guarantee compares; default: what suits the sampling"
    _choice(noise, "--neighbours", "add_or_remove_one replace_special replace_one", text)
    text = "whose data is protected: a client's (default), or one example's in local steps"
    _choice(noise, "--unit", "client example", text, "client")

    bench = command("bench", "bench.print_speed", "time the local-update engine on random data")
    _options(bench, _OVERRIDES)
    _flags(bench, {"--json": "print one JSON object"})


def _add_names(command: Callable[..., Any], parser: argparse.ArgumentParser) -> None:
    assets = command("assets", "listing.assets", "list or fetch the demo's model and data")
    _options(assets, ("name", "NAME", None, {"nargs": "?"}))

    text = "print a script for your shell that completes with Tab"
    example = 'bash: eval "$(fedjax-peft completion bash)" in ~/.bashrc'
    shell = command("completion", "completion.completion", text, example)
    shell.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    shell.set_defaults(root=parser)

    text = "print versions, devices, caches, memory and extras, for a bug report"
    command("doctor", "doctor.doctor", text)

    text = "explain a config key: meaning, type and default"
    key = command("explain", "explain.print_explanation", text)
    _options(key, ("key", "KEY", "such as peft.rank, rank, algorithm or peft.lora"))

    names = command("list", "listing.list_names", "list the names that a config can use")
    text = (
        "nothing for an overview; or models, backbones, data, partitions, peft, algorithms,"
        " aggregators, optimizers, transforms, privacy, attacks, asynchronous, availability,"
        " presets, devices or keys, optionally with a name (list algorithm ditto) or a part of one"
        " (list keys rate); or any part of a name or description"
    )
    _options(names, ("words", "WORD", text, _ANY))
