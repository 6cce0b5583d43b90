"""The half dtypes for which a device has arithmetic units. Without units: fp32 by default, or a warning.

Half precision without units is emulated: on a CPU a product takes up to 40 times as long as in fp32.
"""

from __future__ import annotations

import functools
import logging
import os

import torch

from autoamp.errors import UsageError, warn_user
from autoamp.tensors import dtype_name
from autoamp.torch_private import mkldnn

log = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "AUTOAMP_HALF_UNITS"
HALF_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_BY_NAME = {name: dtype for dtype, half in HALF_NAMES.items() for name in (half, dtype_name(dtype))}
# oneDNN takes bf16 up to these limits too, by conversion to fp32.
_LIMITS_WITHOUT_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")


def half_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a half dtype that is given as such or by name, such as ``"fp16"`` or ``"float16"``; None for None.

    Raises:
        UsageError: It is none.
    """
    found = _BY_NAME.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is None or found in HALF_NAMES:
        return found
    shown = dtype if isinstance(dtype, torch.dtype) else repr(dtype)
    choices = "torch.float16 or torch.bfloat16, by name 'fp16' or 'bf16'"
    raise UsageError(f"dtype={shown} is not a half-precision dtype; choose {choices}")


def has_units(dtype: torch.dtype, device_type: str, *, start_cuda: bool = False) -> bool:
    """Whether a device computes in a half dtype without converting to fp32.

    The environment variable `AUTOAMP_HALF_UNITS` overrides this; it lists the dtypes with units, such as ``bf16,fp16``.

    Args:
        dtype: The half dtype.
        device_type: For types that torch has no information on, the result is True.
        start_cuda: Whether to initialize CUDA in order to ask it. That fixes the GPUs that this process and its forks
            see. If CUDA is neither initialized nor to be initialized, the result is True.

    Raises:
        UsageError: The environment variable names something else.
    """
    configured = os.environ.get(ENVIRONMENT_VARIABLE)
    if configured is not None:
        names = {name.strip() for name in configured.split(",")} - {""}
        if not names <= {*HALF_NAMES.values()}:
            rule = "expected 'bf16', 'fp16', 'bf16,fp16', or '' for none"
            raise UsageError(f"{ENVIRONMENT_VARIABLE}={configured!r}: {rule}")
        return HALF_NAMES[dtype] in names
    if device_type == "cpu":
        return dtype in _units_of_cpu()
    if device_type == "cuda" and torch.version.hip is None and (start_cuda or torch.cuda.is_initialized()):
        return torch.cuda.get_device_capability() >= ((8, 0) if dtype is torch.bfloat16 else (7, 0))
    # Of Apple's GPUs those of the M1 have none for bf16, and torch does not tell which it is.
    return device_type != "mps" or dtype is torch.float16


def _units_of_cpu() -> list[torch.dtype]:
    has = torch.cpu.get_capabilities()
    if not str(has["architecture"]).startswith("x86"):
        # On ARM oneDNN has kernels for bf16 alone.
        found = {torch.bfloat16: has.get("bf16") and mkldnn.has_bf16(), torch.float16: has.get("fp16_arith")}
    else:
        limited = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _LIMITS_WITHOUT_BF16
        found = {
            torch.bfloat16: (has.get("avx512_bf16") or has.get("amx_bf16")) and mkldnn.has_bf16() and not limited,
            torch.float16: (has.get("avx512_fp16") or has.get("amx_fp16")) and mkldnn.has_fp16(),
        }
    return [dtype for dtype, there in found.items() if there]


def default_half_dtype(device_type: str) -> torch.dtype:
    """Return the half dtype that `torch.autocast` uses on ``device_type``: fp16 on CUDA, bf16 on a CPU.

    Raises:
        UsageError: Torch has none for it, as for ``"meta"``.
    """
    try:
        return torch.get_autocast_dtype(device_type)
    except RuntimeError:
        raise UsageError(
            f"torch has no default half dtype for device_type={device_type!r}; give dtype=torch.float16 or "
            "dtype=torch.bfloat16, or choose another device type"
        ) from None


def half_dtype_with_units(device_type: str) -> torch.dtype | None:
    """Return bf16 if ``device_type`` has units for it, else `default_half_dtype` if it has units for that, else None.

    bf16 has the range of fp32, so losses need no scale. That suits programs without mixed precision of their own. None
    means that half precision would be slower than fp32.
    """
    default = default_half_dtype(device_type)
    found = (dtype for dtype in (torch.bfloat16, default) if has_units(dtype, device_type, start_cuda=True))
    return next(found, None)


def missing_units(dtype: torch.dtype, device_type: str) -> str:
    """Return a message: the device has no units for a half dtype, and the setting that limits it."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") if device_type == "cpu" else None
    device = "this CPU" if device_type == "cpu" else f"this device ({device_type})"
    return f"{device} has no {HALF_NAMES[dtype]} units" + (f" (ONEDNN_MAX_CPU_ISA={limit})" if limit else "")


def falls_back_to_fp32(dtype: torch.dtype | None, device_type: str) -> bool:
    """Whether a call gets fp32: it names no half dtype, and the device has no units for its default one.

    The fallback is logged. A half dtype that the call names is used, with a warning if it is slow.
    """
    if dtype is not None:
        warn_if_slow(dtype, device_type)
        return False
    default = default_half_dtype(device_type)
    if has_units(default, device_type):
        return False
    log_fp32(device_type)
    return True


def log_fp32(device_type: str) -> None:
    """Log why a program without a half dtype runs in fp32. Only the first of several ranks logs it."""
    default = default_half_dtype(device_type)
    if os.environ.get("RANK", "0") == "0":
        log.warning(
            "running in fp32: %s, and half precision would be slower. To use it anyway, pass dtype=%s, or "
            "--dtype %s", missing_units(default, device_type), default, HALF_NAMES[default],
        )  # fmt: skip


@functools.cache
def warn_if_slow(dtype: torch.dtype, device_type: str) -> None:
    """Warn once per process if the device has no units for a half dtype."""
    if dtype not in HALF_NAMES or has_units(dtype, device_type):
        return
    other = torch.bfloat16 if dtype is torch.float16 else torch.float16
    remedy = (
        f"{HALF_NAMES[other]} (dtype={other}, or --dtype {HALF_NAMES[other]})"
        if has_units(other, device_type)
        else "fp32 (enabled=False, or --opt-level O0)"
    )
    warn_user(f"{missing_units(dtype, device_type)}: half precision is slower than in fp32; use {remedy}")
