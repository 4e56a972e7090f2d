"""``python -m fedjax_peft``: the command line."""

import sys

from fedjax_peft.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
