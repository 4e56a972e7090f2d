"""Processes that are killed: forks of one process, which imports the library once for all."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
SERVER = """
import json, os, sys
import {module} as tests  # it makes no array, for JAX starts its threads with the first one

for line in sys.stdin:
    child = os.fork()
    if not child:
        tests.child(*json.loads(line))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextlib.contextmanager
def children(module):
    """Yields a function that calls ``module.child`` in a new process, and returns its exit code."""
    path = os.pathsep.join([str(TESTS / "helpers"), str(TESTS / "simulation")])
    env = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SERVER.format(module=module)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, **pipes) as server:

        def run(*arguments):
            print(json.dumps(arguments, default=str), file=server.stdin, flush=True)
            return int(server.stdout.readline())

        yield run
