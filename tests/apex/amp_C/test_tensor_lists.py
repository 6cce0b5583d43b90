"""Multi-tensor functions against the same in fp64, and the noop flag."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autoamp
from autoamp.apex.amp_C import tensor_lists as mt
from autoamp.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from autoamp.errors import UsageError

MIXED = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(3,), (2, 5), (), (0,)]


@pytest.fixture(params=[None, torch.float16, torch.bfloat16], ids=str, autouse=True)
def casts(request: pytest.FixtureRequest) -> None:
    """Run everything without casts, and with casts to each half dtype."""
    if request.param is not None:
        autoamp.init(dtype=request.param, device_type="cpu")


def flag() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def mixed(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(shape).to(dtype) for dtype in MIXED for shape in SHAPES]


def exact(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def assert_rounded(found: list[Tensor], expected: list[Tensor]) -> None:
    """Hold tensors against fp64 ones: equal after one rounding, of fp32 and then of their dtype."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype))


def test_applier_calls_with_its_chunk_size() -> None:
    buffer, lists = flag(), [[torch.ones(1)]]
    assert MultiTensorApply(7)(lambda *args: args, buffer, lists, 1, "two") == (7, buffer, lists, 1, "two")
    assert multi_tensor_applier.chunk_size == 65536
    assert multi_tensor_applier.available
    assert multi_tensor_applier.import_err is None
    multi_tensor_applier.check_avail()


def test_scale_writes_outputs_of_other_dtypes() -> None:
    inputs, outputs, noop = mixed(0), list(reversed(mixed(1))), flag()
    inputs = [
        tensor.reshape(out.shape) if tensor.numel() == out.numel() else out.clone()
        for tensor, out in zip(inputs, outputs, strict=True)
    ]
    before = exact(inputs)
    mt.multi_tensor_scale(65536, noop, [inputs, outputs], 0.37)
    assert_rounded(outputs, [tensor * 0.37 for tensor in before])
    assert_rounded(inputs, before)
    assert noop.item() == 0


def test_scale_in_place() -> None:
    tensors = mixed(0)
    expected = [tensor * 4.0 for tensor in exact(tensors)]
    multi_tensor_applier(mt.multi_tensor_scale, flag(), [tensors, tensors], 4.0)
    assert_rounded(tensors, expected)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [*MIXED, torch.float64])
def test_scale_flags_and_passes_on_what_is_not_finite(bad: float, dtype: torch.dtype) -> None:
    inputs = [torch.ones(3), torch.tensor([1.0, bad], dtype=dtype)]
    outputs, noop = [torch.zeros(3), torch.zeros(2)], flag()
    mt.multi_tensor_scale(65536, noop, [inputs, outputs], 0.5)
    assert noop.tolist() == [1]
    torch.testing.assert_close(outputs[1], torch.tensor([0.5, bad]), equal_nan=True)
    torch.testing.assert_close(outputs[0], torch.full((3,), 0.5))


def test_scale_flags_what_leaves_the_range_of_the_output() -> None:
    noop = flag()
    mt.multi_tensor_scale(65536, noop, [[torch.ones(2)], [torch.zeros(2, dtype=torch.float16)]], 1e6)
    assert noop.item() == 1


def test_a_flag_that_is_set_stays_set() -> None:
    noop = torch.ones(1, dtype=torch.int32)
    mt.multi_tensor_scale(65536, noop, [[torch.ones(2)], [torch.zeros(2)]], 1.0)
    mt.multi_tensor_l2norm(65536, noop, [[torch.ones(2)]])
    assert noop.item() == 1


def test_axpby() -> None:
    xs, ys, noop = mixed(0), mixed(1), flag()
    outputs = [torch.empty_like(x, dtype=torch.float32) for x in xs]
    mt.multi_tensor_axpby(65536, noop, [xs, ys, outputs], 2.0, -0.3, -1)
    expected = [2.0 * x - 0.3 * y for x, y in zip(exact(xs), exact(ys), strict=True)]
    assert_rounded(outputs, expected)
    mt.multi_tensor_axpby(65536, noop, [xs, ys, xs], 2.0, -0.3, -1)
    assert_rounded(xs, expected)
    assert noop.item() == 0


@pytest.mark.parametrize(("check", "in_x", "in_y"), [(-1, 1, 1), (0, 1, 0), (1, 0, 1)])
def test_axpby_looks_where_it_is_told(check: int, in_x: int, in_y: int) -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    for x, y, expected in ((bad, good, in_x), (good, bad, in_y)):
        noop = flag()
        mt.multi_tensor_axpby(65536, noop, [[x], [y], [torch.zeros(2)]], 1.0, 1.0, check)
        assert noop.item() == expected


def test_state_dicts_with_counts_are_averaged() -> None:
    """The average of a model with batch norms, by its lists of parameters and buffers."""
    ema, now = [torch.ones(2), torch.tensor(5)], [torch.zeros(2), torch.tensor(9)]
    noop = flag()
    mt.multi_tensor_axpby(65536, noop, [ema, now, ema], 0.75, 0.25)
    mt.multi_tensor_scale(65536, noop, [ema, ema], 2.0)
    assert (ema[0].tolist(), int(ema[1]), int(noop)) == ([1.5, 1.5], 5, 0)


def test_norms() -> None:
    tensors, noop = mixed(0), flag()
    total, each = mt.multi_tensor_l2norm(65536, noop, [tensors], True)
    expected = torch.stack([tensor.norm() for tensor in exact(tensors)])
    assert total.shape == (1,)
    torch.testing.assert_close(each, expected.float())
    torch.testing.assert_close(total, expected.norm().reshape(1).float())
    assert mt.multi_tensor_l2norm(65536, noop, [tensors])[1].numel() == 0
    assert noop.item() == 0


def test_norm_of_halves_does_not_overflow_nor_vanish() -> None:
    large, small = torch.full((100,), 6e4, dtype=torch.float16), torch.full((4,), 2.0**-14, dtype=torch.float16)
    noop = flag()
    assert mt.multi_tensor_l2norm(65536, noop, [[large]])[0].item() == pytest.approx(6e5, rel=1e-3)
    assert mt.multi_tensor_l2norm(65536, noop, [[small]])[0].item() == 2.0**-13
    assert noop.item() == 0


def test_norm_of_fp64_is_fp64() -> None:
    total, each = mt.multi_tensor_l2norm(1, flag(), [[torch.tensor([1e200], dtype=torch.float64), torch.ones(1)]], True)
    assert total.dtype is torch.float64
    assert each.tolist() == [1e200, 1.0]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_norm_flags(bad: float) -> None:
    noop = flag()
    mt.multi_tensor_l2norm(65536, noop, [[torch.ones(2), torch.tensor([bad])]])
    assert noop.item() == 1


def test_no_tensors() -> None:
    noop = flag()
    mt.multi_tensor_scale(65536, noop, [[], []], 1.0)
    mt.multi_tensor_axpby(65536, noop, [[], [], []], 1.0, 1.0)
    assert mt.multi_tensor_l2norm(65536, noop, [[]])[0].tolist() == [0.0]
    assert noop.item() == 0


def test_parameters_can_be_written() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    mt.multi_tensor_scale(65536, flag(), [[torch.full((2,), 3.0)], [parameter]], 2.0)
    assert parameter.tolist() == [6.0, 6.0]


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ([[torch.ones(1)]], "there are 1"),
        ([[torch.ones(1)], []], r"\[1, 0\]"),
        ([[torch.ones(1), torch.ones(2)], [torch.zeros(1), torch.zeros(1)]], r"place 1 .*\(2,\), \(1,\)"),
    ],
)
def test_lists_that_do_not_fit(lists: list[list[Tensor]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        mt.multi_tensor_scale(65536, flag(), lists, 1.0)
    assert all(not tensor.any() for tensors in lists[1:] for tensor in tensors)


def test_unknown_arg_to_check() -> None:
    with pytest.raises(UsageError, match="arg_to_check=2"):
        mt.multi_tensor_axpby(65536, flag(), [[torch.ones(1)]] * 3, 1.0, 1.0, 2)


def test_by_the_names_of_apex(apex: Any) -> None:
    import amp_C
    import apex_C
    from apex.multi_tensor_apply import multi_tensor_applier

    inputs, outputs, noop = [torch.ones(2), torch.ones(3)], [torch.zeros(2), torch.zeros(3)], flag()
    multi_tensor_applier(amp_C.multi_tensor_scale, noop, [inputs, outputs], 3.0)
    assert [tensor.tolist() for tensor in outputs] == [[3.0] * 2, [3.0] * 3]
    norm, _ = amp_C.multi_tensor_l2norm(65536, noop, [outputs], False)
    assert norm.item() == pytest.approx(45**0.5)
    flat = apex_C.flatten(outputs)
    assert flat.tolist() == [3.0] * 5
    assert [tensor.shape for tensor in apex_C.unflatten(flat, outputs)] == [(2,), (3,)]
    assert apex.multi_tensor_apply.multi_tensor_applier is multi_tensor_applier
    with pytest.raises(AttributeError, match="not provided"):
        _ = amp_C.multi_tensor_nope
