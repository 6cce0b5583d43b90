"""What a handle is made from: checked arguments, and the defaults in their place."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from autoamp.core.loader import load_table
from autoamp.core.loss_scale import make_scaler
from autoamp.core.precisions import check_module_rules
from autoamp.core.rules import CastTable
from autoamp.errors import UsageError
from autoamp.half_units import default_half_dtype, half_dtype
from autoamp.tensors import default_device_type

OnNonfinite = Literal["warn", "raise", "skip"]
Scope = Literal["global", "modules"]
"""Where `init` casts."""


@dataclass(frozen=True)
class Settings:
    """The arguments of ``init`` after defaults are filled in. Equal settings mean the same handle.

    ``half_table`` has the rules inside the models that `initialize` casts to half; None where it casts none.
    """

    device_type: str
    dtype: torch.dtype
    table: CastTable
    loss_scale: Any = None
    enable_caching: bool = True
    verbose: bool = False
    allow_banned: bool = True
    rebind: bool = True
    scope: str = "global"
    trace_overflow: bool = False
    capsule: str | Path | None = None
    on_nonfinite: OnNonfinite = "warn"
    opt_level: str | None = None
    half_table: CastTable | None = None

    @classmethod
    def from_arguments(
        cls, lists: Any = None, device_type: str | None = None, dtype: torch.dtype | str | None = None, **others: Any
    ) -> Settings:
        """Fill in the defaults, read the lists and check the arguments, which are those of `init`. Nothing is patched.

        Raises:
            ListFileError: A list cannot be used.
            UsageError: An argument is wrong.
            LossScaleError: The loss scale is no scale.
        """
        device_type = device_type_of(device_type)
        dtype = half_dtype(dtype) or default_half_dtype(device_type)
        table = load_table(lists, base="bf16" if dtype is torch.bfloat16 else "default", device_type=device_type)
        check_module_rules(table.modules)
        settings = cls(device_type, dtype, table, **others)
        if settings.capsule is not None:
            settings = replace(settings, trace_overflow=True)
        if settings.scope not in ("global", "modules"):
            raise UsageError(f"scope={settings.scope!r} is unknown; choose 'global' or 'modules'")
        if settings.on_nonfinite not in ("warn", "raise", "skip"):
            raise UsageError(f"on_nonfinite={settings.on_nonfinite!r} is unknown; choose 'warn', 'raise', 'skip'")
        make_scaler(settings.loss_scale, dtype)
        return settings

    def covers(self, asked: Settings) -> bool:
        """Whether these settings have what others ask for: dtype, device type, lists, and all that is no default."""
        wanted = {field.name: getattr(asked, field.name) for field in fields(asked)}
        defaults = {field.name: field.default for field in fields(asked)}
        return all(value == defaults[name] or value == getattr(self, name) for name, value in wanted.items())

    @property
    def rules_in_force(self) -> CastTable:
        """The handle's own rules; those inside half models where it has none."""
        return self.half_table if self.half_table is not None and not self.table.rules else self.table

    def facts(self) -> dict[str, str]:
        """Return what ranks that train together have to have alike, by name."""
        # trace_overflow: each rank locates its own overflows alone.
        names = ("opt_level", "device_type", "scope", "enable_caching", "trace_overflow", "on_nonfinite")
        return {
            "the version of autoamp": versions()["autoamp"],
            "the version of torch": torch.__version__,
            "the half dtype": str(self.dtype),
            **{name: str(getattr(self, name)) for name in names},
        }

    def rules(self) -> dict[str, str]:
        """Return the policy of each listed op and the precision of each listed module."""
        modules = {f"[modules] {rule.pattern}": rule.precision.value for rule in self.table.modules}
        of_half_models = () if self.half_table is None else self.half_table.rules
        within = {f"inside half models {rule.target}": rule.policy.value for rule in of_half_models}
        return {**{rule.target: rule.policy.value for rule in self.table.rules}, **within, **modules}


def versions() -> dict[str, str]:
    """Return the versions of autoamp, torch and Python."""
    ours = str(getattr(sys.modules.get("autoamp"), "__version__", "unknown"))
    return {"autoamp": ours, "torch": str(torch.__version__), "python": platform.python_version()}


def device_type_of(device: Any = None) -> str:
    """Return the type of a device or of its name; the current accelerator's for None.

    Raises:
        UsageError: Torch knows no such device.
    """
    try:
        return default_device_type() if device is None else str(torch.device(device).type)
    except (RuntimeError, TypeError):
        raise UsageError(
            f"device_type={device!r} is unknown to torch; choose 'cuda', 'cpu', 'xpu' or 'mps', for example"
        ) from None


def check_device(device_type: str) -> None:
    """Raise UsageError for a type of accelerator that is not there: nothing would ever be cast."""
    built = getattr(torch.accelerator.current_accelerator(), "type", None) == device_type
    # Not is_available(), which fixes which GPUs a process and its forks see.
    found = torch.cuda.device_count() > 0 if device_type == "cuda" else built
    if device_type in ("cuda", "xpu", "mps") and not found:
        why = "none is visible" if built else f"torch {torch.__version__} was built without it"
        raise UsageError(
            f"device_type={device_type!r}: there is no {device_type.upper()} device here, as {why}; choose "
            "device_type='cpu', or leave it out"
        )
