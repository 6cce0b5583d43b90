"""What all kernels' Python sides share: arguments that are one number, the head of a struct, and the launch."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from autoamp_kernels.abi import ABI, CPU, CUDA, PARTS, Args, GradScale
from autoamp_kernels.cuda import Modules, unit_of
from autoamp_kernels.errors import ArgumentError, KernelError
from autoamp_kernels.library import library
from autoamp_kernels.tables import Table, Tables

__all__ = [
    "address",
    "bare_args",
    "by_operator",
    "device_code",
    "fill_grad_scale",
    "launch",
    "new_args",
    "space",
    "sums",
    "tables",
]

A = TypeVar("A", bound=Args)

# The tables of all calls by functions. Who wants to drop them can: `tables.clear()`.
tables = Tables()

_PLAIN = torch._C._disabled_torch_dispatch_impl if hasattr(torch._C, "_disabled_torch_dispatch_impl") else None


_increment_version: Any = torch.autograd.graph.increment_version

# How many modes watch torch's operators; none where this torch cannot tell.
_watching_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def by_operator(lists: Iterable[Sequence[Tensor] | None]) -> bool:
    """Tell whether a call must go through torch's dispatcher: it is compiled, watched, or tensors are of another kind.

    States need not be among the lists: they are of the kind of their parameters.

    A direct call has less overhead, which for hundreds of tensors is most of the host's time.
    """
    if torch.compiler.is_compiling() or _watching_modes():
        return True
    kinds = set(map(type, itertools.chain.from_iterable(filter(None, lists))))
    return any(getattr(kind, "__torch_dispatch__", _PLAIN) is not _PLAIN for kind in kinds)


def device_code(device: torch.device) -> int:
    """Return a device's type, as the kernels take it."""
    return CPU if device.type == "cpu" else CUDA


def address(kernel: str, name: str, tensor: Tensor | None, table: Table, *dtypes: torch.dtype) -> int | None:
    """Return where a tensor of one element lies, None for none.

    Raises:
        ArgumentError: It has several elements, or is of another dtype or on another device than the kernel wants.
    """
    if tensor is None:
        return None
    if tensor.dtype not in dtypes or tensor.device != table.device or tensor.numel() != 1:
        allowed = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
        raise ArgumentError(
            f"{kernel}: {name} has dtype {tensor.dtype}, shape {tuple(tensor.shape)}, on {tensor.device}; it must be "
            f"one element of dtype {allowed} on {table.device}"
        )
    return tensor.data_ptr()


def bare_args(kind: type[A], device: torch.device) -> A:
    """Return a struct of arguments whose head says that there are no lists of tensors."""
    args = kind()
    head = args.head
    head.size, head.version, head.device, head.threads = (
        ctypes.sizeof(kind), ABI, device_code(device), torch.get_num_threads(),
    )  # fmt: skip
    return args


def new_args(
    kernel: str, kind: type[A], table: Table, found_inf: Tensor | None, fill: Callable[[A, Table], None]
) -> A:  # fmt: skip
    """Return a struct of arguments whose head is filled.

    Args:
        kernel: The name of the kernel, for messages.
        kind: The struct.
        table: The lists of the call.
        found_inf: As in `Head`.
        fill: Sets what is the same in each call with what the table says is written. The table keeps it.
    """
    if table.args is None:
        first = bare_args(kind, table.device)
        head = first.head
        head.tensors, head.counts = len(table.counts), int(table.counts.ctypes.data)
        head.first_chunk = int(table.first_chunk.ctypes.data)
        fill(first, table)
        table.args = first
    args = kind.from_buffer_copy(table.args)
    args.head.threads = torch.get_num_threads()
    if found_inf is not None:
        args.head.found_inf = address(kernel, "found_inf", found_inf, table, torch.float32)
    return args


def fill_grad_scale(
    kernel: str, scale: GradScale, table: Table, number: float, grad_scale: Tensor | None, grad_factor: Tensor | None
) -> None:  # fmt: skip
    """Set what gradients are multiplied by, in a struct that says nothing of tensors."""
    scale.number = number
    if grad_factor is not None:
        scale.factor = address(kernel, "grad_factor", grad_factor, table, torch.float32)
    if grad_scale is not None:
        scale.scale = address(kernel, "grad_scale", grad_scale, table, torch.float32)


def space(table: Table, count: int, dtype: torch.dtype) -> Tensor:
    """Return space for numbers between the passes of a kernel, on the device of the call.

    It is the caller's until the launch returns. After that the stream's order keeps it, on CUDA as well.
    """
    return torch.empty(count, dtype=dtype, device=table.device)


def sums(table: Table, each: int = 1) -> Tensor:
    """Return space for sums: ``each`` for a chunk; on CUDA ``each`` for a part of one, and one for a tensor."""
    chunks = each * int(table.first_chunk[-1])
    count = chunks + 1 if device_code(table.device) == CPU else PARTS * chunks + len(table.counts)
    return space(table, count, torch.float64)


def launch(kernel: str, args: Args, device: torch.device, written: Iterable[Sequence[Tensor] | None] = ()) -> None:
    """Run a kernel, and tell autograd which tensors it wrote, but for those that the call has made, and for states.

    States are an optimizer's own: no graph has saved them, so nobody asks for their versions.

    Raises:
        KernelError: There are no kernels for the device, or they failed. The message names the kernel.
    """
    if args.head.device == CUDA:
        fill_cuda(kernel, args, device)
    library().call(kernel, args)
    _count_writes([tensors for tensors in written if tensors])


def fill_cuda(kernel: str, args: Args, device: torch.device) -> None:
    """Set the stream and the module of a call on a GPU."""
    if device.type != "cuda":
        raise KernelError(f"kernel {kernel}: no kernels for {device}; choose a CPU or CUDA")
    index, unit = device.index, unit_of(kernel, args)
    try:
        modules = _modules()
        module = modules.opened(index, unit)
        if module is None:
            if torch.cuda.is_current_stream_capturing():
                raise KernelError(
                    "it cannot be loaded while a graph is captured; call it once with these dtypes before the capture"
                )
            module = modules.open(index, unit)
    except KernelError as error:
        raise KernelError(f"kernel {kernel}: {error}") from error
    args.head.module, args.head.stream = module, torch.cuda.current_stream(device).cuda_stream


@functools.cache
def _modules() -> Modules:
    return Modules(library())


def _count_writes(lists: Sequence[Sequence[Tensor]]) -> None:
    """Let each tensor's ``_version`` go up, as torch's own in-place functions do."""
    tensors = list(itertools.chain.from_iterable(lists))
    if any(some[0].is_inference() for some in lists):
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]
    _increment_version(tensors)
