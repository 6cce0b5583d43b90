"""Runs programs one after the other in this process, each with a fresh alias, and prints a JSON line about each.

The arguments are a half dtype's name and the programs' paths. Between two programs everything goes: the alias, the
handle, registrations, process groups, torch's global settings; torch is proved to be what it was at the start.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import time
import traceback
import warnings

import torch
import torch._dynamo
import torch.distributed

import autoamp
from autoamp.compat import install_as_apex, uninstall
from autoamp.runtime import active

WATCHED = (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch._VF, torch.nn.Module, torch.nn.RNNBase)


def fingerprint() -> dict[tuple[str, str], int]:
    """Identify what a patch could touch. A submodule that torch imports when it is needed is no change."""
    return {
        (owner.__name__, name): id(value)
        for owner in WATCHED
        for name, value in vars(owner).items()
        if not name.startswith("__") and not isinstance(value, type(torch))
    }


def run(path: str, dtype: torch.dtype) -> str:
    """Run a program as ``__main__`` and return the traceback of its failure, "" for none."""
    torch.manual_seed(0)
    # The programs stay on the CPU, also where there is an accelerator.
    install_as_apex(dtype=dtype, device_type="cpu")
    argv, sys.argv = sys.argv, [path]
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException:
        return traceback.format_exc()
    finally:
        sys.argv = argv
        uninstall()
        handle = autoamp.current_handle()
        if handle is not None:
            handle.deactivate()
        active.handles.registry.rules.clear()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return ""


def main() -> None:
    """Run what the command line names."""
    dtype, before = getattr(torch, sys.argv[1]), fingerprint()
    for path in sys.argv[2:]:
        output, start = io.StringIO(), time.perf_counter()
        with contextlib.redirect_stdout(output), warnings.catch_warnings(record=True):
            error = run(path, dtype)
        now = fingerprint()
        changed = sorted(".".join(key) for key in now.keys() | before.keys() if now.get(key) != before.get(key))
        left = sorted(name for name in sys.modules if name.partition(".")[0] in ("apex", "amp_C", "apex_C"))
        row = {"program": path, "error": error, "output": output.getvalue(), "changed": changed, "left": left}
        print(json.dumps({**row, "seconds": round(time.perf_counter() - start, 2)}), flush=True)


if __name__ == "__main__":
    main()
