"""Runs scripts in forks of a process that has imported torch: each has a namespace of its own, and starts at once.

It reads a line of JSON for each script on standard input, ``{"script": ..., "folder": ..., "output": ...}``, and
answers with the exit code on standard output.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from typing import NoReturn

import autoamp  # noqa: F401


def _run(script: str, folder: str, output: str) -> NoReturn:
    """Run a script in this process, which is a fork, and end it."""
    os.chdir(folder)
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv, sys.path[0] = [script], folder
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Serve until standard input ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(asked["script"], asked["folder"], asked["output"])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
