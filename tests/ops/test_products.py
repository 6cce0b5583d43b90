"""Ops that torch's autocast casts for the one call: the results of casts by hand, and no trace afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

import autoamp
from autoamp.casting.casts import Casts
from autoamp.ops.products import COMPOSITES, HALF_OPS, build_composite

FULL = torch.float32
HALVES = torch.float16, torch.bfloat16
NAMES = sorted({op.__name__ for op in HALF_OPS})
LISTS = {"extends": [], "fp16": NAMES}


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def half(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    autoamp.init(device_type="cpu", dtype=dtype, lists=LISTS)
    return dtype


@pytest.fixture(autouse=True)
def torch_casts_as_before() -> Iterator[None]:
    def state() -> list[Any]:
        return [torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), torch.get_autocast_dtype("cpu")]

    before = state()
    yield
    assert state() == before


CALLS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (lambda x, w, b: F.linear(x, w, b), [(3, 4), (5, 4), (5,)]),
    "linear without bias": (lambda x, w: F.linear(x, w), [(3, 4), (5, 4)]),
    "matmul": (lambda x, w: torch.matmul(x, w), [(3, 4), (4, 5)]),
    "Tensor.matmul": (lambda x, w: x.matmul(w), [(3, 4), (4, 5)]),
    "__matmul__": (lambda x, w: x @ w, [(3, 4), (4, 5)]),
    "mm": (lambda x, w: torch.mm(x, w), [(3, 4), (4, 5)]),
    "bmm": (lambda x, w: torch.bmm(x, w), [(2, 3, 4), (2, 4, 5)]),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w), [(5,), (3, 4), (4, 5)]),
    "baddbmm": (lambda b, x, w: torch.baddbmm(b, x, w), [(2, 3, 5), (2, 3, 4), (2, 4, 5)]),
    "addbmm": (lambda b, x, w: torch.addbmm(b, x, w), [(3, 5), (2, 3, 4), (2, 4, 5)]),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 1, 1), [(2, 3, 8), (4, 3, 3), (4,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, (1, 1), "same"), [(2, 3, 8, 8), (4, 3, 3, 3), (4,)]),
    "conv2d, bias None": (lambda x, w: F.conv2d(x, w, None, (2, 2)), [(2, 3, 8, 8), (4, 3, 3, 3)]),
    "conv3d": (lambda x, w: F.conv3d(x, w), [(2, 3, 4, 4, 4), (4, 3, 3, 3, 3)]),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w), [(2, 3, 4, 4), (3, 4, 3, 3)]),
}


def leaves(shapes: list[tuple[int, ...]], parameters: bool) -> list[Tensor]:
    made = [torch.randn(shape, requires_grad=True) for shape in shapes]
    return [made[0], *map(Parameter, made[1:])] if parameters else made


def gradients(result: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(result.float().square().sum(), inputs))


@pytest.mark.parametrize("parameters", [False, True], ids=["tensors", "parameters"])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_casts_by_hand(half: torch.dtype, name: str, parameters: bool) -> None:
    call, shapes = CALLS[name]
    inputs = leaves(shapes, parameters)
    result = call(*inputs)
    by_hand = call(*(tensor.to(half) for tensor in inputs))
    assert result.dtype is by_hand.dtype is half
    assert torch.equal(result, by_hand)
    for one, other in zip(gradients(result, inputs), gradients(by_hand, inputs), strict=True):
        assert one.dtype is FULL
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", CALLS)
def test_some_arguments_in_half_already(half: torch.dtype, name: str) -> None:
    call, shapes = CALLS[name]
    inputs = leaves(shapes, True)
    expected = call(*(tensor.to(half) for tensor in inputs))
    for place in range(len(inputs)):
        mixed = [tensor.to(half) if at == place else tensor for at, tensor in enumerate(inputs)]
        assert torch.equal(call(*mixed), expected)


def test_what_is_not_fp32_stays_as_it_was(half: torch.dtype) -> None:
    double = torch.ones(2, 2, dtype=torch.float64)
    assert torch.mm(double, double).dtype is torch.float64
    assert F.linear(double, Parameter(double)).dtype is torch.float64
    whole = torch.ones(2, 2, dtype=torch.int64)
    assert torch.mm(whole, whole).dtype is torch.int64
    sparse = torch.eye(2).to_sparse()
    assert torch.mm(sparse, torch.ones(2, 2)).dtype is FULL
    assert torch.mm(Parameter(sparse), torch.ones(2, 2)).dtype is FULL
    assert F.linear(torch.ones(2, 2, device="meta"), Parameter(torch.ones(2, 2, device="meta"))).dtype is FULL


def test_an_error_leaves_autocast_off(half: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        F.linear(torch.ones(2, 3), Parameter(torch.ones(2, 2)))
    assert not torch.is_autocast_enabled("cpu")


def test_the_thread_s_own_autocast_settings_are_kept(half: torch.dtype) -> None:
    other = torch.bfloat16 if half is torch.float16 else torch.float16
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_cache_enabled(False)
    torch.set_autocast_dtype("cpu", other)
    try:
        assert F.linear(torch.ones(2, 2), Parameter(torch.ones(2, 2))).dtype is half
        assert torch.get_autocast_dtype("cpu") is other
        assert not torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_cache_enabled(True)
        torch.set_autocast_dtype("cpu", before)


def test_a_mode_sees_no_autocast(half: torch.dtype) -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return func(*args, **kwargs or {})

    with Mode():
        assert F.linear(torch.ones(2, 2), Parameter(torch.ones(2, 2))).dtype is half
    assert seen
    assert not any(seen)


def test_torch_s_own_cache_of_casts_stays_out_of_it(half: torch.dtype) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first = self.layer(x)
            with torch.no_grad():
                self.layer.weight.add_(1.0)
            return first, self.layer(x)

    model, x = Twice(), torch.eye(2)
    first, second = model(x)
    assert torch.equal(second, model.layer.weight.detach().to(half).t())
    assert not torch.equal(first, second)


def test_query_key_and_value_share_a_cast_of_their_input(half: torch.dtype) -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [layer(x) for layer in self.layers]

    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == (3, 4):
            saved.add(tensor.data_ptr())
        return tensor

    model, x = Projections(), torch.randn(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(x)
    assert len(saved) == 1
    (gradient,) = torch.autograd.grad(sum(output.float().sum() for output in outputs), [x])
    expected = sum(layer.weight.detach().to(half).float().sum(0) for layer in model.layers).expand(3, 4)
    torch.testing.assert_close(gradient, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("bias", [True, False])
def test_pinned_weights(half: torch.dtype, bias: bool) -> None:
    handle = autoamp.init(device_type="cpu", dtype=half, lists=LISTS)
    layer, x = nn.Linear(4, 4, bias=bias), torch.randn(3, 4)
    expected = layer(x).detach()
    with handle.inference(layer):
        with torch.no_grad():
            for given in (x, x, x.to(half)):
                assert torch.equal(layer(given), expected)
            assert layer(x.double().float()[:, :, None].squeeze(2)).dtype is half
        assert layer(x).requires_grad


@pytest.mark.parametrize("other", [3, None, [1]], ids=str)
def test_an_operand_that_is_no_tensor_is_torch_s_own_error(half: torch.dtype, other: Any) -> None:
    with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for @"):
        torch.ones(2, 2) @ other


def test_every_name_was_found() -> None:
    assert len(NAMES) == 14
    assert "linear" in NAMES


# -- composites --


def test_composites_run_under_autocast_where_an_argument_is_half(half: torch.dtype) -> None:
    casts, general = Casts(half, "cpu"), []
    casts.open()
    seen: list[tuple[bool, bool, torch.dtype]] = []
    other = HALVES[HALVES[0] is half]
    torch.set_autocast_dtype("cpu", other)

    def within(*args: Any, **kwargs: Any) -> Any:
        seen.append(
            (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), torch.get_autocast_dtype("cpu"))
        )
        return F.cross_entropy(*args, **kwargs)

    def otherwise(*args: Any, **kwargs: Any) -> None:
        general.append((args, kwargs))

    replacement = build_composite(within, otherwise, casts)
    x, labels = torch.randn(4, 8).to(half), torch.arange(4)
    loss = replacement(x, labels, reduction="sum")
    assert (loss.dtype, seen, general) == (torch.float32, [(True, False, half)], [])
    assert torch.equal(loss, F.cross_entropy(x.float(), labels, reduction="sum"))
    replacement(x.float(), labels)
    assert seen.pop() == (False, True, other)
    with pytest.raises((IndexError, ValueError)):
        replacement(x, torch.arange(5))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert torch.get_autocast_dtype("cpu") is other
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    assert not general
    for args in ((x, labels, x, None, 0, x), (x.to_sparse(), labels), (object(),)):
        replacement(*args, **({"out": x} if len(args) > 2 else {}))
    with torch.autocast("cpu", half):
        replacement(x, labels)
    assert len(general) == 4


def test_cuda_has_composites_of_its_own() -> None:
    assert {F.cross_entropy, torch.trapezoid, torch.Tensor.trace} <= COMPOSITES
    assert HALF_OPS.isdisjoint(COMPOSITES)
