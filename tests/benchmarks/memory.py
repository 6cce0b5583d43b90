"""Bytes that a forward pass saves for backward, each storage counted once; parameters themselves are not counted."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn

import autoamp
from tests.benchmarks.models import resnet, transformer
from tests.benchmarks.runs import loss_of

# The ops of CPU autocast that occur in these models, under the policies that it gives them.
SAME_POLICIES: dict[str, Any] = {
    "extends": [],
    "fp16": ["linear", "matmul", "bmm", "conv2d", "scaled_dot_product_attention", "lstm"],
}


def saved_bytes(model: nn.Module, x: Tensor, y: Tensor, region: Any) -> int:
    """Return how many bytes the loss of a batch keeps for its backward pass, in a region such as torch.autocast."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    # Held until all are counted, so that no address is taken twice.
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), region:
        loss_of(model, x, y)
    return sum(sizes.values())


def compare() -> dict[str, dict[str, float]]:
    """Return by model the bytes under torch.autocast and under autoamp with its policies, in bf16, and their ratio."""
    makers = {
        "transformer": functools.partial(transformer, width=64, batch=8, length=32),
        "ResNet-18": functools.partial(resnet, width=16, batch=4, size=64),
    }
    found = {}
    for name, make in makers.items():
        batch = make()
        autocast = saved_bytes(*batch, torch.autocast("cpu", dtype=torch.bfloat16))
        with autoamp.region(device_type="cpu", dtype=torch.bfloat16, lists=SAME_POLICIES):
            own = saved_bytes(*batch, contextlib.nullcontext())
        found[name] = {"autocast": autocast, "autoamp": own, "ratio": own / autocast}
    return found
