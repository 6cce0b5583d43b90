"""Runs scripts under plain Python or `autoamp run`, each in a fork of one process that has the libraries loaded.

    python -m tests.integration.batch plain|fp16|bf16 script.py ...

Prints JSON: by script ``code``, ``out`` and ``err``.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

from autoamp_command import main as autoamp

LIBRARIES = ("numpy", "torch", "torch.utils.data", "sklearn.datasets", "sklearn.cluster", "pandas", "matplotlib.pyplot")


def main(mode: str, scripts: list[str]) -> None:
    """Run the scripts one after the other and print what became of them."""
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    # A fork that looked through what is there by now, for garbage, would copy all of it.
    gc.freeze()
    print(json.dumps({Path(script).stem: _forked(mode, script) for script in scripts}))


def _forked(mode: str, script: str) -> dict[str, object]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os._exit(_ran(mode, script))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return {"code": code, "out": out.read().decode(), "err": err.read().decode()}


def _ran(mode: str, script: str) -> int:
    """Run a script in this process and return the exit code that Python would end with."""
    sys.argv = [script]
    code = 0
    try:
        if mode == "plain":
            runpy.run_path(script, run_name="__main__")
        else:
            autoamp(["run", "--dtype", mode, script])
    except SystemExit as end:
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # `os._exit` skips what `autoamp run` tells at the end, and worker processes that are to be waited for.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
