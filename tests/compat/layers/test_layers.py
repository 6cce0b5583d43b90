"""Attention, dense layers and norms against torch's functions, with the same inputs and weights, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import autoamp
from autoamp.compat.layers import attention, contrib, mlp, vision

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
WIDTH, HEADS, TIME, SOURCE, BATCH = 6, 2, 4, 5, 3
Shape = tuple[int, ...]


@dataclass
class Case:
    """A function of autoamp and one of torch, called with the same tensors: inputs by place, weights by name."""

    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    inputs: list[Shape]
    weights: dict[str, Shape]


def layer(module: nn.Module, theirs: Callable[..., Tensor], *inputs: Shape, **options: Any) -> Case:
    names = {name.replace(".", "_"): name for name, _ in module.named_parameters()}

    def ours(*given: Tensor, **weights: Tensor) -> Tensor:
        found = functional_call(module, {names[name]: weight for name, weight in weights.items()}, given, options)
        return found[0] if isinstance(found, tuple) else found

    shapes = {name: tuple(module.get_parameter(own).shape) for name, own in names.items()}
    return Case(ours, theirs, list(inputs), shapes)


def masks(kind: str, source: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the arguments for a mask as Apex has them, and as torch has them."""
    if kind == "padding":
        padding = torch.arange(source) >= torch.tensor([[source - 1], [source - 2], [source]])
        return {"key_padding_mask": padding.byte()}, {"key_padding_mask": padding}
    if kind == "future":
        future = torch.triu(torch.ones(TIME, source, dtype=torch.uint8), 1)
        return {"attn_mask": future}, {"attn_mask": future.bool()}
    if kind == "added":
        added = torch.linspace(-2.0, 2.0, BATCH * source).view(BATCH, source)
        return {"key_padding_mask": added}, {"key_padding_mask": added.double()}
    return {}, {}


def by_part(rows: Tensor, parts: int) -> Tensor:
    """Sort rows that go by head, part (queries, keys, values) and feature by part, head and feature."""
    return rows.unflatten(0, (HEADS, parts, -1)).transpose(0, 1).flatten(0, 2)


def attended(masked: dict[str, Tensor]) -> Callable[..., Tensor]:
    def theirs(query: Tensor, key: Tensor | None = None, _: Any = None, **weights: Tensor) -> Tensor:
        norm = [weights[name] for name in weights if name.startswith("lyr_nrm")]
        given = F.layer_norm(query, (WIDTH,), *norm) if norm else query
        rows: list[Tensor | None] = []
        for kind in ("weight", "bias"):
            if f"in_proj_{kind}" in weights:
                rows.append(by_part(weights[f"in_proj_{kind}"], 3))
            elif f"q_{kind}" in weights:
                rows.append(torch.cat([weights[f"{part}_{kind}"] for part in "qkv"]))
            elif f"in_proj_{kind}_q" in weights:
                rows.append(torch.cat([weights[f"in_proj_{kind}_q"], by_part(weights[f"in_proj_{kind}_kv"], 2)]))
            else:
                rows.append(None)
        source = given if key is None else key
        out = (weights["out_proj_weight"], weights.get("out_proj_bias"))
        found, _ = F.multi_head_attention_forward(
            given, source, source, WIDTH, HEADS, *rows, None, None, False, 0.0, *out, training=False, **masked
        )
        return found + query if norm else found

    return theirs


def self_attention(mask: str, bias: bool, norm: bool, impl: str, separate: bool) -> Case:
    options, masked = masks(mask, TIME)
    module = attention.SelfMultiheadAttn(WIDTH, HEADS, 0.0, bias, norm, impl, separate, mask == "added")
    return layer(module, attended(masked), (TIME, BATCH, WIDTH), **options)


def encoder_attention(mask: str, bias: bool, norm: bool, impl: str) -> Case:
    options, masked = masks(mask, SOURCE)
    module = attention.EncdecMultiheadAttn(WIDTH, HEADS, 0.0, bias, norm, impl)
    source = (SOURCE, BATCH, WIDTH)
    return layer(module, attended(masked), (TIME, BATCH, WIDTH), source, **options)


def perceptron(bias: bool, activation: str) -> Case:
    following: Any = {"none": lambda x: x, "relu": F.relu, "sigmoid": torch.sigmoid}[activation]

    def theirs(x: Tensor, **weights: Tensor) -> Tensor:
        for place in (0, 1):
            x = following(F.linear(x, weights[f"weight_{place}"], weights.get(f"bias_{place}")))
        return x

    return layer(mlp.MLP([4, 6, 3], bias=bias, activation=activation), theirs, (5, 4))


def gelu_dense(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)


def group_norm(act: str) -> Case:
    def theirs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        normed = F.group_norm(x, 3, weight, bias, 1e-3)
        return F.silu(normed) if act else normed

    return layer(vision.GroupNorm(3, 6, eps=1e-3, act=act), theirs, (2, 6, 4, 5))


def batch_norm(fuse: bool, added: bool) -> Case:
    def theirs(x: Tensor, z: Tensor | float = 0.0, *, weight: Tensor, bias: Tensor) -> Tensor:
        normed = F.batch_norm(x.permute(0, 3, 1, 2), None, None, weight, bias, training=True).permute(0, 2, 3, 1) + z
        return normed.relu() if fuse else normed

    return layer(vision.BatchNorm2d_NHWC(5, fuse_relu=fuse), theirs, *[(4, 3, 2, 5)] * (1 + added))


CASES = {
    "self": self_attention("none", False, False, "fast", False),
    "self, padding": self_attention("padding", True, True, "fast", False),
    "self, future": self_attention("future", True, True, "default", True),
    "self, added": self_attention("added", False, False, "default", True),
    "encoder": encoder_attention("none", False, False, "fast"),
    "encoder, padding": encoder_attention("padding", True, True, "fast"),
    "encoder, future": encoder_attention("future", True, True, "default"),
    "mlp": perceptron(True, "relu"),
    "mlp, sigmoid": perceptron(True, "sigmoid"),
    "mlp, no activation": perceptron(False, "none"),
    "dense": layer(mlp.FusedDense(4, 3), F.linear, (2, 5, 4)),
    "dense, no bias": layer(mlp.FusedDense(4, 3, bias=False), F.linear, (5, 4)),
    "dense, gelu": layer(mlp.FusedDenseGeluDense(4, 6, 3), gelu_dense, (5, 4)),
    "group norm": group_norm(""),
}
NORMS = {
    "group norm": group_norm(""),
    "group norm, silu": group_norm("silu"),
    "group norm, Swish": group_norm("Swish"),
    "batch norm": batch_norm(False, False),
    "batch norm, relu": batch_norm(True, False),
    "batch norm, added": batch_norm(True, True),
    "layer norm": layer(
        contrib.FastLayerNorm(6, eps=1e-3), lambda x, weight, bias: F.layer_norm(x, (6,), weight, bias, 1e-3), (3, 6)
    ),
}


def check(case: Case, dtype: torch.dtype, weight_dtype: torch.dtype, tolerance: float) -> Tensor:
    """Compare outputs and the gradients of all inputs and weights, and return our output."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in case.inputs]
    weights = {
        name: (torch.randn(shape) * 0.5).to(weight_dtype).requires_grad_() for name, shape in case.weights.items()
    }
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wide_weights = {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}
    found, expected = case.ours(*inputs, **weights), case.theirs(*wide, **wide_weights)
    torch.testing.assert_close(found.detach().double(), expected.detach(), rtol=tolerance, atol=tolerance)
    factors = torch.randn(expected.shape, dtype=torch.float64)
    (found.double() * factors).sum().backward()
    (expected * factors).sum().backward()
    for one, other in zip([*inputs, *weights.values()], [*wide, *wide_weights.values()], strict=True):
        assert one.grad is not None
        assert one.grad.dtype is one.dtype
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=tolerance, atol=10 * tolerance)
    return found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_layer_matches_torch(case: Case, dtype: torch.dtype) -> None:
    assert check(case, dtype, dtype, TOLERANCE[dtype]).dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_norm_with_fp32_weights_matches_torch(case: Case, dtype: torch.dtype) -> None:
    assert check(case, dtype, torch.float32, TOLERANCE[dtype]).dtype is dtype


@pytest.mark.parametrize("name", [*CASES, "layer norm"])
def test_layer_under_casts_matches_torch(name: str, half: torch.dtype) -> None:
    autoamp.init(dtype=half, device_type="cpu")
    found = check({**NORMS, **CASES}[name], torch.float32, torch.float32, TOLERANCE[half])
    if name.startswith(("mlp", "dense")):
        assert found.dtype is half
    if "norm" in name:
        assert found.dtype is torch.float32
