"""Tapes that run again: with chosen operators in fp32, in surroundings that would disturb them, and not at all."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

import autoamp
from autoamp.tools.tape import CannotRerun, Load, Op, Place, Ref, Rerun, Tape, everything, record
from tests.tools.tape.programs import last_value


def test_chosen_operators_in_fp32() -> None:
    x = torch.full((4,), 12.0, dtype=torch.float16)
    with record() as tape:
        y = x.exp()
        z = y.log()
    assert z.tolist() == [float("inf")] * 4

    def run(*names: str) -> float:
        return last_value(tape, z, lambda op: op.name in names)[0].item()

    # exp alone has its result rounded for log, which overflows again; log alone gets inf.
    assert run() == run("aten::exp") == run("aten::log") == float("inf")
    assert run("aten::exp", "aten::log") == pytest.approx(12.0)


def test_fp32_results_flow_through_views_and_writes() -> None:
    x = torch.full((2, 3), 300.0, dtype=torch.float16)
    with record() as tape:
        y = x * x
        y[0].mul_(2)
        z = y.t().contiguous().view(-1) / 600
    assert torch.isinf(z).all()
    assert last_value(tape, z, everything).tolist() == [300.0, 150.0] * 3


def test_dtype_arguments_become_fp32() -> None:
    x = torch.full((4,), 1.0) / 3
    with record() as tape:
        y = x.to(torch.bfloat16).sum(dtype=torch.bfloat16)
        z = torch.softmax(x.half(), -1, dtype=torch.float32) + torch.zeros((), dtype=torch.half)
    for tensor, expected in ((y, 4 / 3), (z, 0.25)):
        value = last_value(tape, tensor, everything)
        assert value.dtype is torch.float32
        assert value.flatten()[0].item() == pytest.approx(expected, rel=1e-6)


def test_mask_of_minus_inf_and_of_the_lowest_half_number() -> None:
    scores = torch.randn(2, 4, dtype=torch.float16)
    mask = torch.tensor([0.0, 0.0, -torch.inf, torch.finfo(torch.float16).min], dtype=torch.float16)
    with record() as tape:
        result = torch.softmax((scores + mask + mask).float(), -1)
    assert torch.allclose(last_value(tape, result, everything), result, atol=1e-3)


class Refuses(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def test_surroundings_do_not_matter() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    with record() as tape:
        loss = (w @ w).exp().sum()
        loss.backward()
    ref = tape.find(loss)
    assert ref is not None
    assert w.grad is not None
    before, state = w.grad.clone(), torch.get_rng_state()
    handle = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16), record() as other, torch.inference_mode():
            run = Rerun(tape).finish()
        with Refuses():
            again = Rerun(tape).finish()
        values = [one.value(ref) for one in (run, again)]
    finally:
        handle.deactivate()
    assert list(other.ops) == []
    assert all(torch.equal(value, loss) for value in values)
    assert torch.equal(w.grad, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_tensor_that_was_written_to_since() -> None:
    x = torch.ones(3)
    with record() as tape:
        x * 2
    x.add_(1)
    with pytest.raises(CannotRerun, match="written to since"):
        Rerun(tape).finish()


def test_bits_of_half_tensors_have_no_fp32() -> None:
    x = torch.ones(4, dtype=torch.float16)
    with record() as tape:
        (x * 2).view(torch.int16) + 1
    Rerun(tape).finish()
    with pytest.raises(CannotRerun, match="bits of half tensors"):
        Rerun(tape, everything).finish()


@torch.library.custom_op("autoamp_test::half_alone", mutates_args=())
def half_alone(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float32:
        raise RuntimeError("only support fp16 and bf16 data type")
    return x * 2


def test_operator_without_a_kernel_for_fp32_runs_in_half() -> None:
    x = torch.full((2,), 1.0).half()
    with record() as tape:
        y = half_alone(x / 3) * 3
    ref = tape.find(y)
    assert ref is not None
    run = Rerun(tape, everything).finish()
    assert [op.name for op in run.left_half] == ["autoamp_test::half_alone"]
    assert run.value(ref).dtype is torch.float32
    assert run.value(ref)[0].item() == float(torch.tensor(1 / 3).half()) * 6


@torch.library.custom_op("autoamp_test::laid_out", mutates_args=())
def laid_out(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t() if x.dtype is torch.float32 else x.contiguous().clone()


def test_result_that_is_laid_out_in_another_way_in_fp32() -> None:
    x = torch.arange(6.0).view(2, 3).half()
    with record() as tape:
        y = laid_out(x)
        y[0].mul_(2)
        z = y.view(-1) + 1
    assert torch.equal(last_value(tape, z, everything), z.float())


def test_result_of_another_size_in_fp32() -> None:
    x = torch.full((3,), 0.1)
    with record() as tape:
        half = x.half()
        y = half[half >= x].sum()
    assert y.item() == 0
    assert last_value(tape, y, everything).item() == pytest.approx(0.3)


def test_cast_that_returns_its_argument_in_fp32() -> None:
    x = torch.ones(3)
    with torch.inference_mode(), record() as tape:
        # Under inference mode a cast is one operator, which returns what needs no cast.
        y = x.to(torch.float16)
        y.add_(1)
        z = x + y
    assert next(op.name for op in tape.ops) == "aten::to"
    assert last_value(tape, z, everything).tolist() == z.tolist() == [3.0] * 3


def test_softmax_of_a_gpu_that_makes_an_fp32_result() -> None:
    # A CPU has no kernel that does both.
    x = torch.tensor([0.0, 1.0]).half()
    load = Load(0, x.dtype, x.untyped_storage(), x.untyped_storage())
    refs = Ref(0, torch.float16, (2,), (1,), 0), Ref(1, torch.float32, (2,), (1,), 0)
    op = Op(torch.ops.aten._softmax.default, [refs[0], -1, True], {}, refs[1], Place(), True, "forward")
    run = Rerun(Tape(events=[load, op]), everything).finish()
    assert run.left_half == []
    assert torch.equal(run.value(refs[1]), torch.softmax(x.float(), -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dropout_of_a_gpu_runs_by_its_mask(dtype: torch.dtype) -> None:
    x = (torch.ones(100) / 3).to(dtype)
    with record() as tape:
        y = torch.native_dropout(x, 0.25, True)[0] * 3
    assert torch.equal(last_value(tape, y), y)
    wide = last_value(tape, y, everything)
    assert wide.dtype is torch.float32
    assert torch.allclose(wide, torch.where(y > 0, x.float() * 4, 0.0))
