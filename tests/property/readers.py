"""Ways in which programs read a gradient: each takes a gradient and returns a tensor."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.dlpack
from torch import Tensor, nn

__all__ = ["READERS"]


@torch.jit.script
def scripted(gradient: Tensor) -> Tensor:
    return gradient * 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


def by_data(gradient: Tensor) -> Tensor:
    tensor = torch.empty(0, dtype=gradient.dtype)
    tensor.data = gradient
    return tensor


def by_saving(gradient: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


def by_address(gradient: Tensor) -> Tensor:
    """Read memory as a library in C does."""
    gradient = gradient.contiguous()
    size = gradient.numel() * gradient.element_size()
    copied = bytearray((ctypes.c_char * size).from_address(gradient.data_ptr()).raw)
    return torch.frombuffer(copied, dtype=gradient.dtype)


def by_storage(gradient: Tensor) -> Tensor:
    return torch.empty(0, dtype=gradient.dtype).set_(gradient.untyped_storage())  # type: ignore[call-overload]


def without_torch_function(gradient: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return gradient * 2


def into_a_layer(gradient: Tensor) -> Tensor:
    layer = nn.Module()
    layer.register_buffer("kept", torch.zeros_like(gradient))
    layer.load_state_dict({"kept": gradient})
    return layer.kept.clone()  # type: ignore[operator, no-any-return]


def added(gradient: Tensor) -> Tensor:
    total = torch.zeros_like(gradient)
    total += gradient
    return total


READERS: dict[str, Callable[[Tensor], Any]] = {
    "clone": lambda g: g.clone(),
    "product": lambda g: g * g,
    "equal": lambda g: torch.tensor(torch.equal(g, g.clone())),
    "stack": lambda g: torch.stack([g, g]),
    "cat": lambda g: torch.cat([g.flatten(), torch.ones(1, dtype=g.dtype)]),
    "lerp": lambda g: torch.lerp(torch.zeros_like(g), g, 0.5),
    "addcmul": lambda g: torch.addcmul(torch.zeros_like(g), g, torch.ones_like(g)),
    "addcmul of itself": lambda g: torch.addcmul(g, g, g, value=0.5),
    "where": lambda g: torch.where(g > 1, g, torch.ones_like(g)),
    "foreach norm": lambda g: torch.stack(list(torch._foreach_norm([g]))),
    "foreach mul": lambda g: torch._foreach_mul([g], 2.0)[0],
    "flatten": lambda g: torch._utils._flatten_dense_tensors([g, g]),
    "vector": lambda g: nn.utils.parameters_to_vector([g]),
    "total norm": lambda g: nn.utils.get_total_norm([g]),
    "norm": lambda g: g.norm(),
    "linalg norm": lambda g: torch.linalg.vector_norm(g),
    "max": lambda g: g.abs().max(),
    "item": lambda g: torch.tensor(g.flatten()[0].item()),
    "list": lambda g: torch.tensor(g.tolist()),
    "tensor": lambda g: torch.tensor(g),
    "as tensor": lambda g: torch.as_tensor(g).clone(),
    "script": scripted,
    "function": Doubled.apply,
    "dlpack": lambda g: torch.from_dlpack(torch.utils.dlpack.to_dlpack(g)).clone(),
    "dlpack protocol": lambda g: torch.from_dlpack(g).clone(),
    "data": by_data,
    "its data": lambda g: g.data.clone(),
    "numpy": lambda g: torch.from_numpy(np.array(g if g.dtype is not torch.bfloat16 else g.float())),
    "array of float": lambda g: torch.from_numpy(g.float().numpy().copy()),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "deep copy": copy.deepcopy,
    "save": by_saving,
    "address": by_address,
    "storage": by_storage,
    "view": lambda g: g.view(-1).clone(),
    "first": lambda g: g[0].clone(),
    "rows": lambda g: torch.stack(list(g)),
    "half": lambda g: g.half(),
    "double": lambda g: g.double(),
    "out": lambda g: torch.add(g, 1, out=torch.empty_like(g)),
    "copy_": lambda g: torch.empty_like(g).copy_(g),
    "added": added,
    "without torch function": without_torch_function,
    "parameter": lambda g: nn.Parameter(g).detach().clone(),
    "load": into_a_layer,
    "functional": lambda g: F.relu(g),
    "einsum": lambda g: torch.einsum("...,...->", g, g),
    "sum": lambda g: sum(g.flatten()),
    "compare": lambda g: g == g.clone(),
    "finite": lambda g: torch.isfinite(g),
    "histogram": lambda g: torch.histc(g.float(), bins=8, min=-8, max=8),
}
