"""What nodes tell of their ops: which one made inf of finite values, and whether fp32 would have held it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp.diagnostics.saved_values import first_not_finite, gradient_is_finite_in_fp32, made_by


def nodes_of(result: Tensor) -> list[Any]:
    nodes: dict[Any, None] = {}
    waiting = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes and not node.name().endswith("AccumulateGrad"):
            nodes[node] = None
            waiting += [following for following, _ in node.next_functions]
    return list(nodes)


def leaf(*values: float, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "values", "finite", "magnitudes"),
    [
        (lambda x: x * x, (1.0, -300.0), True, (300.0, 300.0)),
        (lambda x: x.pow(3), (1.0, 60.0), True, (60.0,)),
        (lambda x: x / torch.tensor(1e-3, dtype=torch.float16), (200.0, 1.0), True, None),
        (lambda x: x / torch.zeros(2, dtype=torch.float16), (200.0, 1.0), False, None),
        (lambda x: (x * 0).log(), (1.0, 2.0), False, (0.0,)),
        (lambda x: x.exp(), (20.0, 1.0), None, ()),
        (lambda x: x.view(1, 2) @ x.view(2, 1), (300.0, 300.0), True, (300.0, 300.0)),
        (lambda x: x + x, (60000.0, 1.0), True, ()),
    ],
)
def test_an_op_in_fp16(
    function: Callable[[Tensor], Tensor], values: tuple[float, ...], finite: bool | None, magnitudes: Any
) -> None:
    result = function(leaf(*values))
    assert not result.isfinite().all()
    made = made_by(result.grad_fn)
    assert made.is_half
    assert made.dtype == torch.float16
    assert made.finite_in_fp32 is finite
    if magnitudes is not None:
        assert made.magnitudes == magnitudes
    if made.flaw is not None:
        assert made.flaw.nan is bool(result.isnan().any())


def test_a_cast_to_fp16() -> None:
    made = made_by(leaf(1e6, dtype=torch.float32).half().grad_fn)
    assert (made.is_half, made.finite_in_fp32) == (True, True)


def test_an_op_in_fp32() -> None:
    made = made_by(leaf(1e30, dtype=torch.float32).pow(2).grad_fn)
    assert (made.is_half, made.finite_in_fp32, made.dtype) == (False, False, torch.float32)
    assert made.magnitudes == (pytest.approx(1e30),)


class Bare:
    """A node of a torch that tells nothing of dtypes."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name == "_input_metadata":
            raise AttributeError(name)
        return getattr(self._node, name)


def test_without_what_torch_tells_of_dtypes() -> None:
    half = Bare((x := leaf(300.0)).mul(x).grad_fn)
    assert made_by(half).finite_in_fp32 is True
    silent = Bare((leaf(60000.0) + leaf(60000.0)).grad_fn)
    assert made_by(silent).finite_in_fp32 is None


def test_the_first_of_several() -> None:
    x = leaf(300.0, 1.0)
    loss = (x * x * x).sum(dtype=torch.float32) * 1e-9
    nodes = nodes_of(loss)
    place = first_not_finite(nodes, wide=True)
    assert place is not None
    assert nodes[place].name() == "MulBackward0"
    assert made_by(nodes[place]).magnitudes == (300.0, 300.0)


@pytest.mark.parametrize(
    ("function", "values", "finite"),
    [
        # The derivative is infinite at 0.
        (lambda x: x.sqrt(), (0.0, 1.0), False),
        (lambda x: x.log(), (0.0, 1.0), False),
        # It is 1e4, and what came was large.
        (lambda x: x * 1e4, (0.0, 1.0), True),
        # It is too large for fp16 itself, which nothing tells from infinite.
        (lambda x: x.pow(3), (200.0, 1.0), None),
        (lambda x: x.float(), (1.0, 1.0), True),
    ],
)
def test_a_gradient_that_overflows_in_fp16(
    function: Callable[[Tensor], Tensor], values: tuple[float, ...], finite: bool | None
) -> None:
    result = function(leaf(*values))
    got = [torch.full((2,), 1e6 if result.dtype == torch.float32 else 1e4, dtype=result.dtype)]
    node: Any = result.grad_fn
    assert gradient_is_finite_in_fp32(node, [node], got) is finite


def test_a_gradient_that_overflows_in_fp32() -> None:
    wide = leaf(0.0, dtype=torch.float32).sqrt()
    assert gradient_is_finite_in_fp32(wide.grad_fn, [wide.grad_fn], [torch.ones(1)]) is False
    # The 0 may be one in half precision alone.
    rounded = leaf(1e-9, dtype=torch.float32).half().float().sqrt()
    assert gradient_is_finite_in_fp32(rounded.grad_fn, nodes_of(rounded), [torch.ones(1)]) is None


def test_a_cast_that_overflows_after_finite_values() -> None:
    x = leaf(1000.0, 1.0, dtype=torch.float32)
    loss = (x * x).half().mean().float()
    nodes = nodes_of(loss)
    place = first_not_finite(nodes, wide=True)
    assert place is not None
    assert nodes[place].name() == "ToCopyBackward0"
