"""`autoamp profile`: runs a program in fp32, and counts the values that fp16 and bf16 cannot hold."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from autoamp.cli.launch import Program, prepared, take_path
from autoamp.cli.options import Options
from autoamp.cli.output import writable
from autoamp.runtime import Handle, Settings, check_device, put_handle


def prepared_profile(chosen: argparse.Namespace) -> Callable[[], None]:
    """Set this process up, and return a function that runs the program and prints the profile when it has ended.

    Args:
        chosen: The parsed command line.

    Raises:
        UsageError: An option is wrong, or there is no such program.
    """
    path = None if chosen.json is None else writable("--json", chosen.json)
    program = Program(chosen.program, tuple(chosen.args), chosen.is_module)
    take_path(program)
    settings = Settings.from_arguments(chosen.lists or None, chosen.device_type, torch.float16)
    check_device(settings.device_type)
    handle: Any = Handle(settings)
    put_handle(handle)
    ranges = handle.profile_ranges()
    run_program = prepared(program, Options(opt_level="O0", device_type=chosen.device_type).as_dict())
    process = os.getpid()

    def run() -> None:
        try:
            with ranges:
                run_program()
        finally:
            # Forks of the program end here too.
            if os.getpid() == process:
                sys.stdout.write(str(ranges))
                if path is not None:
                    path.write_text(ranges.to_json(), encoding="utf-8")

    return run
