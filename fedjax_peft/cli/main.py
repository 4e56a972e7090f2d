"""The command line: ``fedjax-peft``."""

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from fedjax_peft.cli import faults
from fedjax_peft.cli.parser import WITHOUT_JAX, build_parser
from fedjax_peft.cli.process import prepare_jax
from fedjax_peft.engine.devices import distributed
from fedjax_peft.simulation.interrupts import Terminated
from fedjax_peft.support import libraries
from fedjax_peft.support.errors import InputError, MissingPath, nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0; 2 for an error; 130 for Ctrl-C, 143 for SIGTERM.

    The error of one process of ``--distributed`` ends all of them.

    Invalid input and errors of files, encodings and memory are printed as one paragraph
    (:mod:`.faults`). Any other exception is a defect of the program and is raised.
    """
    libraries.prepare()
    faults.guard_streams()
    try:
        try:
            with faults.plain_warnings():
                return _main(arguments)
        finally:  # also after --help, which ends with SystemExit
            faults.flush_output()
    except InputError as error:
        faults.print_error(f"fedjax-peft: {error}")
        distributed.fail(str(error), 2)
        return 2
    except (KeyboardInterrupt, Terminated) as interrupt:
        what, code = "interrupted", 130
        if isinstance(interrupt, Terminated):
            what, code = "ended by SIGTERM", 143
        advice = f". {interrupt}" if str(interrupt) else ""
        faults.print_error(f"\nfedjax-peft: {what}{advice}")
        distributed.fail(what, code)
        return code
    except BrokenPipeError:  # the reader of the output has closed it, as in `| head`
        faults.silence_output()
        return 0
    except Exception as error:
        distributed.await_verdict(error)
        text = faults.explain(error)
        if text is None:
            raise
        faults.print_error(f"fedjax-peft: {text}")
        distributed.fail(text, 2)
        if faults.is_output_fault():  # otherwise Python reports it again at exit
            faults.silence_output()
        return 2


def _main(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    words = sys.argv[1:] if arguments is None else list(arguments)
    options, rest = parser.parse_known_args(words)
    # argparse accepts words and key=value at one place of the line only; here, anywhere.
    if hasattr(options, "words"):
        options.words += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if any(word.startswith("-") or "=" not in word for word in rest) or (
        rest and not hasattr(options, "overrides")
    ):
        advice = _advice(rest, words, options)
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}{advice}")
    if rest:
        options.overrides += rest
    module, function = options.command.split(".")
    with faults.telling("fedjax-peft: loading JAX and its libraries"):
        if module not in WITHOUT_JAX:
            prepare_jax(options)
        command = getattr(importlib.import_module(f"fedjax_peft.cli.{module}"), function)
    try:
        command(options)
    except MissingPath as error:
        folder = getattr(options, "config", Path()).parent.absolute()
        if folder == Path.cwd():
            raise
        raise InputError(f"{error} Nor is it beside the config, in {folder}.") from None
    return 0


def _advice(rest: Sequence[str], words: Sequence[str], options: argparse.Namespace) -> str:
    """Returns advice for an unknown option: the nearest one, or the config key without dashes."""
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
    return f". Config keys are written without dashes: {option[2:].replace('-', '_')}={value}"


if __name__ == "__main__":
    sys.exit(main())
