"""The command ``deploy``, which writes an app for real clients."""

import argparse
import sys

from fedjax_peft.config import config as configs
from fedjax_peft.config import sweeps
from fedjax_peft.deploy.app import write_app
from fedjax_peft.simulation.simulate import arguments
from fedjax_peft.support import display
from fedjax_peft.support.errors import InputError


def deploy(options: argparse.Namespace) -> None:
    """Writes the Flower app of a config with one method."""
    written, overrides = sweeps.read(options.config, options.overrides)
    methods = configs.only(configs.methods(written, overrides), options.only)
    if len(methods) > 1:
        raise InputError(
            f"{options.config} has {len(methods)} methods ({', '.join(methods)}), and an app has"
            " one: choose it with --only NAME."
        )
    (raw,) = methods.values()
    given = configs.run(configs.resolve(raw), act=arguments)
    for notice in write_app(given, options.out):
        print(display.one_line(f"fedjax-peft: {notice}"), file=sys.stderr)
    out = display.argument(options.out)
    who = display.counted(len(given.clients), "client")
    print(f"The app of {who} is in {out}.\n\nNext:\n  read {out}/README.md")
