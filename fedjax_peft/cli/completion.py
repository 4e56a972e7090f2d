"""The command ``completion``: shell scripts that complete commands, options and config keys."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shtab

from fedjax_peft.config import config as configs


def completion(options: argparse.Namespace) -> None:
    """Prints the completion script for a shell."""
    print(script(options.root, options.shell))


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Returns the completion script of a parser for bash, zsh or tcsh.

    It completes commands, options and files; in bash and zsh also the keys of a config.
    """
    for action in _actions(parser):
        if action.dest == "overrides":
            action.complete = {"bash": "_fedjax_peft_keys", "zsh": "_fedjax_peft_keys"}
        elif action.dest == "key":
            action.complete = {"bash": "_fedjax_peft_names", "zsh": "_fedjax_peft_names"}
        elif action.type is Path:
            action.complete = shtab.FILE
    keys = sorted({key.dotted for key in configs.all_keys()} | {*configs.NAMESPACES})
    names = " ".join(keys)
    words = " ".join(f"{key}=" for key in keys)
    preamble = {
        "bash": f'_fedjax_peft_keys() {{ compopt -o nospace; compgen -W "{words}" -- "$1"; }}\n'
        f'_fedjax_peft_names() {{ compgen -W "{names}" -- "$1"; }}',
        "zsh": f"_fedjax_peft_keys() {{ compadd -S '' -- {words} }}\n"
        f"_fedjax_peft_names() {{ compadd -- {names} }}",
    }
    return shtab.complete(parser, shell, preamble=preamble.get(shell, ""))


def _actions(parser: argparse.ArgumentParser) -> Iterator[Any]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
