"""Gradients, many at a time: scale, unscale and check for inf and nan, norms.

Everything here goes through torch's multi-tensor functions, one call for all tensors of a device and dtype. Nothing
waits for a device but `found_any` and `non_finite`, which return Python values.

Of a DTensor each rank takes its own part, and no function here is a collective.

Which gradients are taken: dense and sparse ones, fp16, bf16, fp32 and fp64, and complex ones as pairs of reals. Integer
and bool tensors carry no gradient of a loss and are left alone. Any other dtype is an error.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.utils.weak import TensorWeakRef

from autoamp.core.loss_scale import Factor, Scale, inverse_scale
from autoamp.errors import UsageError
from autoamp.tensors import HALF_DTYPES
from autoamp.torch_private import unscale_and_check_

DeviceAndDtype: TypeAlias = tuple[torch.device, torch.dtype]
_Name = TypeVar("_Name")
# Torch's own, which casts no value.
_MASKED_FILL: Any = torch.Tensor.masked_fill_

Mark = tuple[TensorWeakRef, int | None]
_AVAILABLE = dist.is_available()
_REAL = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_COMPRESSED = frozenset((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_KIND = operator.attrgetter("device", "dtype", "layout")
_CONTIGUOUS, _NEGATED, _INFERENCE = torch.Tensor.is_contiguous, torch.Tensor.is_neg, torch.Tensor.is_inference


def several_processes() -> bool:
    """Whether there is a process group of more than one process."""
    # As torch's own functions find out, which take three times as many calls.
    world: Any = dist.group.WORLD if _AVAILABLE else None
    return world is not None and world.size() > 1


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is torch's DTensor, of which a rank has a part: what `fully_shard` makes of parameters."""
    kind = type(tensor)
    # Of the class: a DTensor's own are properties in Python, and this is asked of every parameter.
    return kind is not torch.Tensor and hasattr(kind, "device_mesh") and hasattr(kind, "placements")


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a flat parameter of `FullyShardedDataParallel`."""
    return bool(getattr(tensor, "_is_flat_param", False))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor that this rank has, which shares its memory; any other tensor as it is."""
    # To enter `no_grad` costs more than to ask a plain tensor for its type.
    if type(tensor) in _PLAIN or not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        # A collective may still be at work on it.
        return local.wait() if hasattr(local, "wait") else local


@torch.no_grad()
def unscale_(
    params: Iterable[torch.Tensor], scale: Scale, flag: Callable[[torch.device], torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Divide every ``param.grad`` by ``scale`` in place and look for inf and nan in the same pass.

    The parameters are taken, not the gradients, as some gradients cannot be written in place or hold one element in
    parts (see `_writable`): ``param.grad`` is a new tensor then. What comes twice is unscaled once.

    Args:
        params: Any tensors; those without a gradient are passed over.
        scale: The loss scale. One that only the device knows is 1 or more.
        flag: Gives an fp32 tensor of one element, 0, on a device; by default a new one.

    Returns:
        One fp32 tensor of shape ``[1]`` for each device: 1.0 if a gradient there held an inf or nan, or holds one now,
        else 0.0. Nothing was read from the device. An empty list if there was no gradient.

    Raises:
        UsageError: A gradient of a dtype that cannot be unscaled.
    """
    found: dict[torch.device, torch.Tensor] = {}
    for (device, dtype), values in _values_by_kind(params).items():
        if device not in found:
            found[device] = torch.zeros(1, dtype=torch.float32, device=device) if flag is None else flag(device)
        # The kernel takes an fp32 factor, which is too coarse for fp64, and looks before it multiplies, which misses
        # what a scale below 1 pushes out of range.
        if dtype is torch.float64 or (isinstance(scale, float) and scale < 1.0):
            _multiply_(values, device, dtype, inverse_scale(scale))
            factor = torch.ones((), dtype=torch.float32, device=device)
        elif isinstance(scale, torch.Tensor):
            factor = scale.reciprocal().to(device, non_blocking=True)
        else:
            factor = torch.full((), 1.0 / scale, dtype=torch.float32, device=device)
        unscale_and_check_(values, found[device], factor)
    return list(found.values())


@torch.no_grad()
def scale_(params: Iterable[torch.Tensor], factor: Factor) -> None:
    """Multiply every ``param.grad`` by ``factor`` in place; the rules are those of `unscale_`.

    Args:
        params: Any tensors; those without a gradient are passed over.
        factor: A finite number. A power of two keeps every bit unless the result leaves the dtype's range.

    Raises:
        UsageError: A gradient of a dtype that cannot be scaled.
    """
    for (device, dtype), values in _values_by_kind(params).items():
        _multiply_(values, device, dtype, factor)


def _multiply_(values: list[torch.Tensor], device: torch.device, dtype: torch.dtype, factor: Factor) -> None:
    if isinstance(factor, torch.Tensor):
        factor = factor.to(device, non_blocking=True)
    if dtype in HALF_DTYPES or (dtype is torch.float32 and isinstance(factor, torch.Tensor)):
        # A product of half tensors takes the factor as a half, on a CPU or as a tensor, which has no room for a scale.
        # This kernel takes it in fp32; what it finds on the way is not asked for.
        spare = torch.empty(1, dtype=torch.float32, device=device)
        unscale_and_check_(values, spare, torch.as_tensor(factor, dtype=torch.float32, device=device))
    else:
        torch._foreach_mul_(values, factor)


@torch.no_grad()
def true_gradient(
    gradient: torch.Tensor, inv_scale: float, factor: torch.Tensor, found: torch.Tensor, *, clean: bool
) -> torch.Tensor:
    """Return a gradient times ``inv_scale``, and look for inf and nan in the same pass. The gradient stays as it is.

    Args:
        gradient: Of any kind that `unscale_` takes.
        inv_scale: 1 / scale.
        factor: The same as one fp32 element on the gradient's device.
        found: One fp32 element on the gradient's device, set to 1.0 if an inf or nan is there.
        clean: Whether to return 0 in place of all of a gradient with inf or nan.

    Returns:
        A new tensor, of the same dtype.

    Raises:
        UsageError: A gradient of a dtype that cannot be unscaled.
    """
    if type(gradient) is not torch.Tensor and is_sharded(gradient):
        # This rank's part. Inf and nan stay.
        result = gradient * inv_scale
        unscale_and_check_([local_of(result).clone()], found, torch.ones_like(factor))
        return result
    if gradient.layout is torch.sparse_coo and gradient.dtype is torch.float16:
        # A sum of finite halves may be inf.
        gradient = gradient.coalesce()
    result = _copied(gradient)
    values = _values(result)
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.dtype not in _REAL:
        raise UsageError(_no_scale_for(values.dtype))
    # As in `unscale_`: the kernel's factor is too coarse for fp64, and it looks before it multiplies.
    if values.dtype is torch.float64 or inv_scale > 1.0:
        values.mul_(inv_scale)
        factor = torch.ones_like(factor)
    unscale_and_check_([values], found, factor)
    if clean:
        # The flag has shape (1,). A gradient without dimensions needs one without.
        _MASKED_FILL(values, found.reshape(()) != 0, 0.0)
    return result


def _copied(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy in which no two elements share memory, and without marks of a lazy conjugation or negation."""
    return gradient.resolve_conj().resolve_neg().clone() if gradient.layout is torch.strided else gradient.clone()


@torch.no_grad()
def widened(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return half tensors in fp32, dense ones by one multi-tensor copy, and all others as they are."""
    given = list(tensors)
    wide = [
        tensor
        if tensor.dtype not in HALF_DTYPES
        else torch.empty_like(tensor, dtype=torch.float32)
        if tensor.layout is torch.strided
        else tensor.float()
        for tensor in given
    ]
    pairs = zip(wide, given, strict=True)
    copies = [(new, old) for new, old in pairs if new is not old and old.layout is torch.strided]
    if copies:
        news, olds = map(list, zip(*copies, strict=True))
        if not _PLAIN.issuperset(map(type, olds)):
            news, olds = list(map(local_of, news)), list(map(local_of, olds))
        torch._foreach_copy_(news, olds)
    return wide


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values that can be read: not a fake one, nor one on the meta device."""
    return not tensor.is_meta and (type(tensor) is torch.Tensor or not hasattr(tensor, "fake_mode"))


def found_any(found: Sequence[torch.Tensor]) -> list[bool]:
    """Read found_inf tensors, with one device synchronisation for each device among them.

    Args:
        found: Tensors of shape ``[1]`` as `unscale_` returns them.

    Returns:
        For each tensor whether it is not 0; False for those without values, by which a program asks for shapes alone.
    """
    if len(found) == 1:
        return [has_values(found[0]) and bool(found[0].item())]
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(found):
        by_device.setdefault(tensor.device, []).append(index)
    flags = [False] * len(found)
    for indices in by_device.values():
        values = torch.cat([found[i] for i in indices])
        for index, value in zip(indices, values.tolist(), strict=True) if has_values(values) else ():
            flags[index] = bool(value)
    return flags


def non_finite(named_grads: Iterable[tuple[_Name, torch.Tensor]], limit: int = 3) -> list[_Name]:
    """Return the names, or what else is given with them, of the first ``limit`` tensors that hold inf or nan.

    This is for error messages: it waits for the device once for each tensor, and stops as soon as it has enough. Of a
    DTensor this rank's part is looked at.
    """
    found = (name for name, grad in named_grads if not bool(torch.isfinite(_values(local_of(grad))).all()))
    return list(itertools.islice(found, limit))


@torch.no_grad()
def total_norm(tensors: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all elements of all tensors taken as one vector.

    Args:
        tensors: Floating-point or complex tensors, dense or sparse, of any devices. One that comes twice counts twice.
        norm_type: The p of the p-norm, above 0; ``inf`` is the largest absolute value.

    Returns:
        A tensor without dimensions on the first tensor's device, fp32 (fp64 if a tensor is fp64 or complex128). It is
        computed in that precision, so fp16 tensors do not overflow on the way. Nothing is read from the device.

    Raises:
        UsageError: ``norm_type`` is not above 0.
    """
    norm_type = float(norm_type)
    if not norm_type > 0.0:
        raise UsageError(f"norm_type={norm_type!r} must be above 0; choose 2.0, another p, or inf")
    # An uncoalesced tensor holds an element in parts, whose norm is not that of the sum.
    values = [_values(t.coalesce() if t.layout is torch.sparse_coo else t) for t in tensors]
    groups = grouped_by_kind([t for t in values if t.numel() > 0])
    norms: list[torch.Tensor] = []
    for (_, dtype), group in groups.items():
        double = dtype in (torch.float64, torch.complex128)
        real = torch.float64 if double else torch.float32
        compute = real if dtype.is_floating_point else (torch.complex128 if double else torch.complex64)
        each = torch._foreach_norm(group, norm_type, dtype=compute)
        norms.append(torch.linalg.vector_norm(torch.stack(each).to(real), norm_type))
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=values[0].device if values else None)
    widest = torch.float64 if any(one.dtype is torch.float64 for one in norms) else torch.float32
    every = [one.to(device=values[0].device, dtype=widest) for one in norms]
    return every[0] if len(every) == 1 else torch.linalg.vector_norm(torch.stack(every), norm_type)


def _values_by_kind(params: Iterable[torch.Tensor]) -> dict[DeviceAndDtype, list[torch.Tensor]]:
    """Return the values of all gradients as `_writable_grads` does, by device and dtype."""
    params = list(params)
    grads: list[Any] = [grad for param in params if (grad := param.grad) is not None]
    if {*map(type, grads)} == {torch.Tensor} and len({*map(id, grads)}) == len(grads):
        # Of one kind, written in place as they are: seen by sweeps that hundreds of parameters do not slow.
        kinds = {*map(_KIND, grads)}
        (device, dtype, layout), *others = kinds
        is_plain = not others and layout is torch.strided and dtype in _REAL and all(map(_CONTIGUOUS, grads))
        locked = is_plain and not torch.is_inference_mode_enabled() and any(map(_INFERENCE, grads))
        if is_plain and not locked and not any(map(_NEGATED, grads)):
            return {(device, dtype): grads}
    groups = grouped_by_kind(_writable_grads(params))
    for _, dtype in groups:
        if dtype not in _REAL:
            raise UsageError(_no_scale_for(dtype))
    return groups


def _no_scale_for(dtype: torch.dtype) -> str:
    return f"a gradient of {dtype} cannot be scaled; keep the parameters in float16, bfloat16, float32 or float64"


def _writable_grads(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the values of all gradients as real dense tensors that can be written in place, each one once."""
    values: dict[int, torch.Tensor] = {}
    refuses_inference = not torch.is_inference_mode_enabled()
    for param in params:
        whole = param.grad
        if whole is None:
            continue
        grad = whole if type(whole) is torch.Tensor else local_of(whole)
        if (
            grad.layout is torch.strided
            and grad.dtype in _REAL
            and grad.is_contiguous()
            and not grad.is_neg()
            and not (refuses_inference and grad.is_inference())
        ):
            values[id(grad)] = grad
        elif grad.is_floating_point() or grad.is_complex():
            writable = _writable(grad)
            if writable is not grad:
                # Of a DTensor all is copied, its local part with it.
                param.grad = writable if grad is whole else whole.clone(memory_format=torch.contiguous_format)
                writable = local_of(param.grad)
            inner = _values(writable)
            values[id(writable)] = torch.view_as_real(inner) if inner.is_complex() else inner
    return list(values.values())


def _writable(grad: torch.Tensor) -> torch.Tensor:
    """Return ``grad``, or its copy if a multiplication in place is refused or would be wrong.

    Refused: expanded and inference tensors, and lazily conjugated or negated ones. Wrong: strides by which elements
    share memory. A sparse fp16 gradient is coalesced too, since a sum of finite halves may be inf and must be seen.
    """
    if grad.layout is torch.sparse_coo and grad.dtype is torch.float16 and not grad.is_coalesced():
        grad = grad.coalesce()
    values = _values(grad)
    locked = values.is_inference() and not torch.is_inference_mode_enabled()
    if locked or values.is_conj() or values.is_neg() or _overlaps_itself(values):
        return _copied(grad)
    return grad


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may lie at one address. False is sure, True may be wrong for unusual strides."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the dense tensor that holds a tensor's values: itself, or that of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.layout in _COMPRESSED:
        return tensor.values()
    return tensor


def grouped_by_kind(tensors: Iterable[torch.Tensor]) -> dict[DeviceAndDtype, list[torch.Tensor]]:
    """Return the tensors of each device and dtype."""
    groups: dict[DeviceAndDtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


# -- gradients that are known --


_VERSION = operator.attrgetter("_version")


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return `version_of` each tensor, by one sweep where none is an inference tensor."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


def version_of(tensor: torch.Tensor) -> int | None:
    """Return how often torch saw a tensor written to; None for an inference tensor, where it does not count."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def mark_of(gradient: torch.Tensor) -> Mark:
    """Return what tells this gradient, with these values, from any other: the object and its version.

    The object is referred to weakly. Writes that torch does not count go unseen: through ``.data``, through numpy, and
    in-place collectives. Of a DTensor
    the version is None, since it does not count multi-tensor functions either.
    """
    return TensorWeakRef(gradient), None if is_sharded(gradient) else version_of(gradient)


def is_same_gradient(mark: Mark | None, gradient: torch.Tensor) -> bool:
    """Whether a gradient is the one of the mark, and was not written to since."""
    return mark is not None and mark[0]() is gradient and mark[1] is not None and mark[1] == version_of(gradient)


def marks_of(params: Iterable[torch.Tensor]) -> dict[int, tuple[weakref.ref[torch.Tensor], int | None]]:
    """Return what tells the gradients of these parameters, as they are now, from any other, by ``id(parameter)``.

    By sweeps that hundreds of parameters do not slow: this runs in each step. What a plain weak reference gives is
    compared and nothing else, so it need not be a `TensorWeakRef`.
    """
    known = {id(param): grad for param in params if (grad := param.grad) is not None}
    grads: list[Any] = list(known.values())
    versions = versions_of(grads)
    if not _PLAIN.issuperset(map(type, grads)):
        versions = [None if is_sharded(grad) else version for grad, version in zip(grads, versions, strict=True)]
    return dict(zip(known, zip(map(weakref.ref, grads), versions, strict=True), strict=True))


def unchecked(
    params: Iterable[torch.Tensor], marks: Mapping[int, tuple[weakref.ref[torch.Tensor], int | None]]
) -> list[torch.Tensor]:
    """Return the parameters whose gradients are others than those of the marks, or were written to since."""
    found = []
    for param in params:
        if (grad := param.grad) is not None:
            mark = marks.get(id(param))
            if mark is None or mark[0]() is not grad or mark[1] is None or grad._version != mark[1]:
                found.append(param)
    return found
