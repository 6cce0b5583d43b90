"""The backward of layer and RMS norms, and the mean and variance of channels, from half or fp32 inputs.

All is computed in fp32, with sums of many in fp64. Results are new tensors, and take no part in autograd. They do not
depend on the number of threads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autoamp_kernels.abi import CPU, SIDE_BY_SIDE, MergeArgs, NormArgs, StatisticsArgs
from autoamp_kernels.calls import bare_args, by_operator, device_code, launch
from autoamp_kernels.errors import ArgumentError
from autoamp_kernels.operators import define
from autoamp_kernels.tables import CODES

__all__ = ["channel_statistics", "layer_norm_backward", "merge_statistics", "rms_norm_backward"]

_ANY = (torch.float32, torch.bfloat16, torch.float16)


def layer_norm_backward(
    grad: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None = None, *,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of a layer norm (Ba, Kiros and Hinton 2016, arXiv:1607.06450, equations 3 and 4).

    With ``x = (input - mean) * rstd`` and ``g = grad * weight`` they are ``rstd * (g - mean(g) - x * mean(g * x))``,
    with means over a row, and the sums over rows of ``grad * x`` and of ``grad``. The values of a row are read once
    from memory, as long as a cache holds them.

    Args:
        grad: The gradient of the result, of any shape; fp32, fp16 or bf16; contiguous.
        input: What was normalised, of the same shape, fp32, fp16 or bf16; contiguous.
        mean: The means of rows, fp32, as `torch.native_layer_norm` returns them: one for each row.
        rstd: The inverse standard deviations of rows, fp32, one for each row.
        weight: fp32, one element for each column; None for 1.
        wanted: Which of the three gradients are wanted.

    Returns:
        The gradients of the input, in its shape and dtype; of the weight, fp32, shape ``(columns,)``; and of the bias,
        likewise. None in the place of each that is not wanted.

    Raises:
        ArgumentError: A tensor that the kernel cannot take.
        KernelError: There are no kernels for this device.
    """
    run = _norm_operator if by_operator([[grad, input, rstd]]) else _norm
    made = run(grad, input, mean, rstd, weight, *wanted)
    return tuple(one if is_wanted else None for one, is_wanted in zip(made, wanted, strict=True))  # type: ignore[return-value]


def rms_norm_backward(
    grad: Tensor, input: Tensor, rstd: Tensor, weight: Tensor | None = None, *,
    wanted: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of an RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4).

    With ``x = input * rstd`` and ``g = grad * weight`` they are ``rstd * (g - x * mean(g * x))``, with means over a
    row, and the sum over rows of ``grad * x``.

    Args:
        grad: The gradient of the result, of any shape; fp32, fp16 or bf16; contiguous.
        input: What was normalised, of the same shape, fp32, fp16 or bf16; contiguous.
        rstd: The inverse root of each row's mean square, fp32, one for each row.
        weight: fp32, one element for each column; None for 1.
        wanted: Which of the two gradients are wanted.

    Returns:
        The gradients of the input, in its shape and dtype, and of the weight, fp32, shape ``(columns,)``. None in the
        place of each that is not wanted.

    Raises:
        ArgumentError: A tensor that the kernel cannot take.
        KernelError: There are no kernels for this device.
    """
    run = _norm_operator if by_operator([[grad, input, rstd]]) else _norm
    of_input, of_weight, _ = run(grad, input, None, rstd, weight, *wanted, False)
    return of_input if wanted[0] else None, of_weight if wanted[1] else None


def _norm(
    grad: Tensor, input: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, of_input: bool,
    of_weight: bool, of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernel, device = "rms_norm_backward" if mean is None else "layer_norm_backward", input.device
    _check(kernel, "input", input, device, _ANY)
    _check(kernel, "grad", grad, device, _ANY, input.numel())
    _check(kernel, "rstd", rstd, device)
    rows, columns = _rows(kernel, input, rstd, weight)
    for name, tensor, count in (("mean", mean, rows), ("weight", weight, columns)):
        if tensor is not None:
            _check(kernel, name, tensor, device, wanted=count)
    made = _norm_fake(grad, input, mean, rstd, weight, of_input, of_weight, of_bias)
    args = bare_args(NormArgs, device)
    args.rows, args.columns, args.rows_at_once = rows, columns, _rows_at_once(rows, columns, device)
    args.grad, args.input, args.rstds = grad.data_ptr(), input.data_ptr(), rstd.data_ptr()
    args.grad_dtype, args.in_dtype = CODES[grad.dtype], CODES[input.dtype]
    args.means = None if mean is None else mean.data_ptr()
    args.weight = None if weight is None else weight.data_ptr()
    args.grad_in = made[0].data_ptr() if of_input else None
    args.grad_weight = made[1].data_ptr() if of_weight else None
    args.grad_bias = made[2].data_ptr() if of_bias else None
    if columns and (of_weight or of_bias):
        blocks = -(-rows // args.rows_at_once)
        # One at least, so that it has an address.
        partial = torch.empty(max(1, 2 * blocks * columns), dtype=torch.float32, device=device)
        args.partial = partial.data_ptr()
    if columns:
        launch("norm", args, device)
    return made


def _norm_fake(
    grad: Tensor, input: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, of_input: bool,
    of_weight: bool, of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    columns = weight.numel() if weight is not None else input.numel() // max(1, rstd.numel())
    return (
        torch.empty_like(input) if of_input else input.new_empty(0),
        input.new_empty(columns if of_weight else 0, dtype=torch.float32),
        input.new_empty(columns if of_bias else 0, dtype=torch.float32),
    )


_norm_operator = define(
    "norm_backward(Tensor grad, Tensor input, Tensor? mean, Tensor rstd, Tensor? weight, bool of_input, "
    "bool of_weight, bool of_bias) -> (Tensor, Tensor, Tensor)",
    _norm,
    _norm_fake,
)


def _rows(kernel: str, input: Tensor, rstd: Tensor, weight: Tensor | None) -> tuple[int, int]:
    rows, count = rstd.numel(), input.numel()
    if count % rows if rows else count:
        raise ArgumentError(f"{kernel}: rstd has {rows} elements and input {count}; give one for each row")
    # Without rows the weight alone tells.
    return rows, count // rows if rows else 0 if weight is None else weight.numel()


def _rows_at_once(rows: int, columns: int, device: torch.device) -> int:
    """Return how many rows share a sum over rows. It depends on sizes alone, so that threads do not change a bit."""
    if device_code(device) != CPU:
        return max(128, -(-rows // 1024))
    # Few enough that some threads have work, and so many that the sums are little beside what is read.
    return max(1, min(max(32, 131072 // max(1, columns)), -(-rows // 16)))


def channel_statistics(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of each channel of a batch.

    Blocks that a cache holds are read twice there, for means and squared deviations, and put together by the formula of
    Chan, Golub and LeVeque 1979 (STAN-CS-79-773, equation 2.1), in fp64. Threads of a GPU take Welford's (1962,
    Technometrics 4, p. 419) in fp32.

    Args:
        input: Shape ``(N, C, *)``; fp32, fp16 or bf16; contiguous, or with the channels' elements side by side
            (`torch.channels_last`).

    Returns:
        The means and variances, fp32, shape ``(C,)``; nan where there are no elements.

    Raises:
        ArgumentError: A tensor that the kernel cannot take.
        KernelError: There are no kernels for this device.
    """
    return (_statistics_operator if by_operator([[input]]) else _statistics)(input)


def _statistics(input: Tensor) -> tuple[Tensor, Tensor]:
    kernel, device = "channel_statistics", input.device
    if input.dim() < 2:
        raise ArgumentError(f"{kernel}: input has shape {tuple(input.shape)}; it must be (N, C, *)")
    side_by_side = input.movedim(1, -1)
    ordered = side_by_side if side_by_side.is_contiguous() and not input.is_contiguous() else input
    _check(kernel, "input", ordered, device, _ANY)
    args = bare_args(StatisticsArgs, device)
    channels = input.shape[1]
    outer, inner = input.shape[0], math.prod(input.shape[2:])
    if ordered is not input or inner <= 1:
        outer, inner = outer * inner, 1
    args.outer, args.channels, args.inner = outer, channels, inner
    args.pieces = pieces = _pieces(outer, channels, inner, device)
    mean, variance = _statistics_fake(input)
    partial = torch.empty(max(1, 3 * pieces * channels), dtype=torch.float64, device=device)
    args.input, args.in_dtype, args.partial = input.data_ptr(), CODES[input.dtype], partial.data_ptr()
    args.means, args.variances = mean.data_ptr(), variance.data_ptr()
    if channels:
        launch("statistics", args, device)
    return mean, variance


def _statistics_fake(input: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(input.new_empty(input.shape[1], dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]


_statistics_operator = define("channel_statistics(Tensor input) -> (Tensor, Tensor)", _statistics, _statistics_fake)


def _pieces(outer: int, channels: int, inner: int, device: torch.device) -> int:
    """Return into how many pieces the batch is cut, so that some threads, or the blocks of a GPU, have work."""
    on_cpu = device_code(device) == CPU
    units = -(-channels // (SIDE_BY_SIDE if on_cpu else 32)) if inner == 1 else channels
    wanted = -(-(16 if on_cpu else 512) // max(1, units))
    return max(1, min(outer if inner > 1 else outer // 128, wanted))


def merge_statistics(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean, the biased variance and the count of several batches together, such as those of all processes.

    By the formula of Chan, Golub and LeVeque 1979 (STAN-CS-79-773, equation 2.1), in fp64.

    Args:
        means: Those of each batch, fp32, shape ``(batches, C)``, contiguous.
        variances: Those of each batch, biased; likewise.
        counts: How many values of a channel each batch has, fp32, shape ``(batches,)``. Batches of 0 do not count.

    Returns:
        Mean and variance, fp32, shape ``(C,)``, nan where there are no values, and the count, fp32, shape ``()``.

    Raises:
        ArgumentError: A tensor that the kernel cannot take.
        KernelError: There are no kernels for this device.
    """
    run = _merge_operator if by_operator([[means, variances, counts]]) else _merge
    return run(means, variances, counts)


def _merge(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kernel, device = "merge_statistics", means.device
    if means.dim() != 2:
        raise ArgumentError(f"{kernel}: means has shape {tuple(means.shape)}; it must be (batches, channels)")
    parts, channels = means.shape
    _check(kernel, "means", means, device)
    _check(kernel, "variances", variances, device, wanted=parts * channels)
    _check(kernel, "counts", counts, device, wanted=parts)
    made = _merge_fake(means, variances, counts)
    args = bare_args(MergeArgs, device)
    args.parts, args.channels = parts, channels
    args.means, args.variances, args.counts = means.data_ptr(), variances.data_ptr(), counts.data_ptr()
    # Of no channels there is no address, but a count.
    args.mean, args.variance, args.count = (one.data_ptr() or made[2].data_ptr() for one in made)
    if parts and channels:
        launch("merge", args, device)
        return made
    return made[0].fill_(math.nan), made[1].fill_(math.nan), made[2].copy_(counts.sum())


def _merge_fake(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return means.new_empty(means.shape[1]), means.new_empty(means.shape[1]), means.new_empty(())


_merge_operator = define(
    "merge_statistics(Tensor means, Tensor variances, Tensor counts) -> (Tensor, Tensor, Tensor)", _merge, _merge_fake
)


def _check(
    kernel: str, name: str, tensor: Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    wanted: int | None = None,
) -> None:  # fmt: skip
    """Raise ArgumentError where the kernel cannot take a tensor."""
    what = f"{kernel}: {name}"
    if tensor.device != device:
        raise ArgumentError(f"{what} is on {tensor.device}; it must be on {device}, as all others")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
        raise ArgumentError(f"{what} has dtype {tensor.dtype}; it must be {allowed}")
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ArgumentError(f"{what} is not contiguous: shape {tuple(tensor.shape)}; give tensor.contiguous()")
    if wanted is not None and tensor.numel() != wanted:
        raise ArgumentError(f"{what} has {tensor.numel()} elements; it must have {wanted}")
