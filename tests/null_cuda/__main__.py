"""Compares autoamp with torch.autocast on a CUDA device that computes nothing.

python -m tests.null_cuda                        all comparisons: pytest under the device
python -m tests.null_cuda -k "lstm and O2"       pytest's own options go on to it
python -m tests.null_cuda --table                the table of docs/performance.md
python -m tests.null_cuda --run script.py        a script of yours; `tests.null_cuda.device.spent(step)` counts

It takes a CUDA build of torch (`pip install torch==2.14.1 torchvision==0.29.1`) and a C compiler, and no GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.null_cuda import device

FOLDER = Path(__file__).parent
PYTEST = ["-m", "pytest", "-n", "0", "-m", "null_cuda", "-p", "no:cacheprovider", str(FOLDER)]


def main() -> None:
    """Run this process anew under the device."""
    options = sys.argv[1:]
    if options[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    if options[:1] == ["--table"]:
        command = ["-m", "tests.null_cuda.table", *options[1:]]
    elif options[:1] == ["--run"]:
        command = options[1:]
    else:
        command = [*PYTEST, *options]
    try:
        environment = device.environment()
    except device.CannotBuildError as reason:
        if command[:2] != PYTEST[:2]:
            sys.exit(f"the null device cannot be built here: {reason}")
        # Each test is skipped with the reason.
        environment = dict(os.environ)
    paths = [str(FOLDER.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *command], environment)


if __name__ == "__main__":
    main()
