"""Runs the command line with ``python -m fedjax_peft``."""

import sys

from fedjax_peft.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
