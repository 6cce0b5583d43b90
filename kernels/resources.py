"""``python kernels/resources.py FOLDER``: registers, stack and spills of each CUDA kernel, as JSON, by nvcc's report.

``AUTOAMP_KERNELS_CUDA`` says for which architecture; the files go to FOLDER. `tests/kernels/resources.json` holds what
is expected of 9.0: ``AUTOAMP_KERNELS_CUDA=90 python kernels/resources.py /tmp > tests/kernels/resources.json``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

REPORT = re.compile(
    r"Function properties for (\w+)\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*?Used (\d+) registers"
)


def parsed(report: str) -> dict[str, dict[str, int]]:
    """Return what ``ptxas -v`` says of each kernel: registers, bytes of stack, bytes spilled."""
    return {
        name: {"registers": int(registers), "stack": int(stack), "spills": int(stores) + int(loads)}
        for name, stack, stores, loads, registers in sorted(REPORT.findall(report))
    }


def main(folder: Path) -> None:
    """Compile, and print the report."""
    from setup import nvcc_command, one_source

    source = folder / "kernels.cu"
    source.write_text(one_source(Path(__file__).resolve().parent / "src" / "cuda_kernels.cu", set()) + "\n")
    command = nvcc_command(source, folder / "kernels.fatbin", "-Xptxas=-v")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    sys.stdout.write(json.dumps(parsed(done.stdout + done.stderr), indent=0) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
