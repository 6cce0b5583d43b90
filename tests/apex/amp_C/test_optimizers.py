"""The optimizer steps against torch's own optimizers and those of `autoamp.optimizers`, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp import optimizers as fused
from autoamp.apex.amp_C import optimizers as mo
from autoamp.errors import UsageError

STEPS = 4
SHAPES = [(3,), (2, 4)]
# Of the gradients and the parameters; the state is fp32, or fp64 with fp64 parameters.
DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]
BETAS = (0.9, 0.99)
ADAM = (*BETAS, 1e-8)
LAMB = (*BETAS, 1e-6)


def flag(value: int = 0) -> Tensor:
    return torch.tensor([value], dtype=torch.int32)


def one(value: float) -> Tensor:
    return torch.tensor([value])


def tensors(dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in SHAPES]


def norm_of(grads: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm([grad.double() for grad in grads]).float().reshape(1)


@dataclass
class Case:
    """A function of `amp_C`, called with (noop_flag, grads, params, states, step), and an optimizer that steps alike.

    ``is_exact`` is False where a number that is fp32 by its definition enters an fp64 step.
    """

    call: Callable[..., None]
    reference: Callable[[Any], torch.optim.Optimizer]
    states: int = 2
    is_exact: bool = True


def sgd(momentum: float, dampening: float = 0.0, nesterov: bool = False, after: bool = False) -> Case:
    def call(noop: Tensor, grads: Any, params: Any, states: Any, step: int) -> None:
        lists = [grads, params, *states]
        mo.multi_tensor_sgd(1, noop, lists, 0.1, momentum, dampening, 0.05, nesterov, step == 1, after, 1.0)

    options: dict[str, Any] = {"momentum": momentum, "dampening": dampening, "weight_decay": 0.1, "nesterov": nesterov}
    if after:
        return Case(call, lambda those: fused.FusedSGD(those, 0.05, wd_after_momentum=True, **options), 1)
    return Case(call, lambda those: torch.optim.SGD(those, 0.05, **options), 1)


def adam(kind: Any, mode: int) -> Case:
    def call(noop: Tensor, grads: Any, params: Any, states: Any, step: int) -> None:
        mo.multi_tensor_adam(1, noop, [grads, params, *states], 0.02, *ADAM, step, mode, 1, 0.1)

    return Case(call, lambda those: kind(those, lr=0.02, betas=BETAS, weight_decay=0.1))


def uncorrected(noop: Tensor, grads: Any, params: Any, states: Any, step: int) -> None:
    mo.multi_tensor_adam(1, noop, [grads, params, *states], 0.02, *ADAM, step, 1, 0, 0.0)


def capturable(kind: Any, mode: int, masters: bool = False) -> Case:
    def call(noop: Tensor, grads: Any, params: Any, states: Any, step: int) -> None:
        numbers = (torch.tensor(0.02), *ADAM, torch.tensor([step], dtype=torch.int32), mode, 1, 0.1, one(1.0))
        if masters:
            models, *averages = states
            mo.multi_tensor_adam_capturable(1, noop, [grads, models, *averages, params], *numbers)
        else:
            mo.multi_tensor_adam_capturable(1, noop, [grads, params, *states], *numbers)

    return Case(call, adam(kind, mode).reference, 2 + masters, is_exact=False)


def fused_lamb(decay: float, nvlamb: bool, limit: float, mode: int) -> Callable[[Any], torch.optim.Optimizer]:
    options: dict[str, Any] = {"weight_decay": decay, "use_nvlamb": nvlamb, "max_grad_norm": limit}
    return lambda those: fused.FusedLAMB(those, 0.02, betas=BETAS, adam_w_mode=mode == 1, **options)


def lamb(decay: float, nvlamb: bool, limit: float, mode: int = 1) -> Case:
    def call(noop: Tensor, grads: Any, params: Any, states: Any, step: int) -> None:
        numbers = (0.02, *LAMB, step, 1, decay, 1, mode, norm_of(grads), limit, nvlamb)
        mo.multi_tensor_lamb(1, noop, [grads, params, *states], *numbers)

    return Case(call, fused_lamb(decay, nvlamb, limit, mode), is_exact=False)


def staged_lamb(noop: Tensor, grads: Any, params: Any, states: Any, step: int) -> None:
    decays, updates = torch.tensor([0.1, 0.1]), [torch.zeros_like(state) for state in states[0]]
    mo.multi_tensor_lamb_stage1(
        1, noop, [grads, params, *states, updates], decays, step - 1, *LAMB, norm_of(grads), 0.5
    )
    norms = [torch.stack([tensor.norm().float() for tensor in those]) for those in (params, updates)]
    mo.multi_tensor_lamb_stage2(1, noop, [params, updates], *norms, 0.02, 0.1)


CASES = {
    "sgd": sgd(0.0),
    "sgd with dampening": sgd(0.9, 0.3),
    "sgd of Nesterov": sgd(0.9, nesterov=True),
    "sgd with decay after momentum": sgd(0.9, after=True),
    "adam": adam(torch.optim.Adam, 0),
    "adamw": adam(torch.optim.AdamW, 1),
    "adam uncorrected": Case(uncorrected, lambda those: fused.FusedAdam(those, 0.02, False, BETAS)),
    "capturable adam": capturable(torch.optim.Adam, 0),
    "capturable adamw": capturable(torch.optim.AdamW, 1),
    "capturable adamw with masters": capturable(torch.optim.AdamW, 1, masters=True),
    "lamb": lamb(0.1, False, 0.5),
    "lamb with decay of gradients": lamb(0.1, False, 100.0, mode=0),
    "lamb without decay": lamb(0.0, False, 0.0),
    "lamb of nv": lamb(0.0, True, 0.5),
    "lamb in two stages": Case(staged_lamb, fused_lamb(0.1, False, 0.5, 1), is_exact=False),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def zeros(dtype: torch.dtype, count: int) -> list[list[Tensor]]:
    return [[torch.zeros(shape, dtype=dtype) for shape in SHAPES] for _ in range(count)]


@cases
@pytest.mark.parametrize(("grad_dtype", "dtype"), DTYPES)
def test_steps_match_the_optimizer(case: Case, grad_dtype: torch.dtype, dtype: torch.dtype) -> None:
    params, states = tensors(dtype, 0), zeros(torch.promote_types(dtype, torch.float32), case.states)
    exact = [torch.nn.Parameter(param.double()) for param in params]
    optimizer = case.reference(exact)
    for step in range(1, STEPS + 1):
        case.call(flag(), tensors(grad_dtype, step), params, states, step)
        for param, grad in zip(exact, tensors(grad_dtype, step), strict=True):
            param.grad = grad.double()
        optimizer.step()
    # A parameter in bf16 is rounded at each step.
    tolerance = {torch.float64: 1e-12 if case.is_exact else 1e-5, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for param, other in zip(params, exact, strict=True):
        torch.testing.assert_close(param.double(), other.detach(), rtol=tolerance, atol=tolerance)


@cases
def test_state_in_half_is_written(case: Case) -> None:
    ends = []
    for dtype in (torch.float16, torch.float32):
        params, states = [tensor.half().to(dtype) for tensor in tensors(torch.float64, 0)], zeros(dtype, case.states)
        case.call(flag(), tensors(torch.float16, 1), params, states, 1)
        ends.append([params, *states])
    for halves, wide in zip(*ends, strict=True):
        torch.testing.assert_close(halves, [tensor.half() for tensor in wide])


@cases
def test_a_set_flag_leaves_all_tensors_as_they_are(case: Case) -> None:
    grads, params, states = tensors(torch.float32, 1), tensors(torch.float32, 0), zeros(torch.float32, case.states)
    lists = [grads, params, *states]
    before = [[tensor.clone() for tensor in those] for those in lists]
    case.call(flag(1), grads, params, states, 1)
    torch.testing.assert_close(lists, before, rtol=0, atol=0)
    case.call(flag(0), grads, params, states, 1)
    torch.testing.assert_close(grads, before[0], rtol=0, atol=0)
    assert not any(map(torch.equal, params, before[1]))


@cases
def test_lists_that_do_not_fit_change_nothing(case: Case) -> None:
    grads, params, states = tensors(torch.float32, 1), tensors(torch.float32, 0), zeros(torch.float32, case.states)
    before = [tensor.clone() for tensor in params]
    with pytest.raises(UsageError, match="of one length"):
        case.call(flag(0), grads[:1], params, states, 1)
    torch.testing.assert_close(params, before, rtol=0, atol=0)


def test_sgd_scales_gradients_and_writes_copies() -> None:
    grads, params, copies = tensors(torch.float32, 1), tensors(torch.float32, 0), zeros(torch.float16, 1)[0]
    expected = [param - 0.5 * 4.0 * grad for param, grad in zip(params, grads, strict=True)]
    lists = [grads, params, *zeros(torch.float32, 1), copies]
    mo.multi_tensor_sgd(1, flag(), lists, 0.0, 0.0, 0.0, 0.5, False, True, False, 4.0)
    torch.testing.assert_close(params, expected)
    assert all(torch.equal(copy, param.half()) for copy, param in zip(copies, params, strict=True))


def test_capturable_adam_unscales_gradients_and_copies_masters(half: torch.dtype) -> None:
    true, masters, plain = tensors(half, 1), tensors(torch.float32, 0), tensors(torch.float32, 0)
    grads, (models,) = [grad * 4 for grad in true], zeros(half, 1)
    number = torch.tensor([1], dtype=torch.int32)
    lists = [grads, models, *zeros(torch.float32, 2), masters]
    mo.multi_tensor_adam_capturable(1, flag(), lists, one(0.02), *ADAM, number, 1, 1, 0.1, one(0.25))
    mo.multi_tensor_adam(1, flag(), [true, plain, *zeros(torch.float32, 2)], 0.02, *ADAM, 1, 1, 1, 0.1)
    assert all(map(torch.equal, grads, true))
    torch.testing.assert_close(masters, plain)
    assert all(torch.equal(model, master.to(half)) for model, master in zip(models, masters, strict=True))


@pytest.mark.parametrize(
    ("args", "ratio"),
    [((0.5,), 3.0), ((0.5, 0.1), 3.0), ((0.5, 0.0), 1.0), ((0.5, 0.0, True), 3.0), ((0.5, 0.0, False), 1.0)],
)
def test_lamb_ratio(args: tuple[Any, ...], ratio: float) -> None:
    params, updates = [torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2)]
    # The second parameter's norm is 0, so its ratio is 1.
    norms = torch.tensor([6.0, 0.0]), torch.tensor([2.0, 2.0])
    mo.multi_tensor_lamb_stage2(1, flag(1), [params, updates], *norms, *args)
    assert params[0].tolist() == [1.0] * 2
    mo.multi_tensor_lamb_stage2(1, flag(), [params, updates], *norms, *args)
    assert params[0].tolist() == [1.0 - 0.5 * ratio] * 2
    assert params[1].tolist() == [0.5] * 2


@pytest.mark.parametrize("mode", [-1, 2])
def test_unknown_modes(mode: int) -> None:
    lists = [tensors(torch.float32, place) for place in range(4)]
    for case in (adam(None, mode), lamb(0.1, False, 1.0, mode)):
        with pytest.raises(UsageError, match=f"mode={mode}"):
            case.call(flag(), *lists[:2], lists[2 : 2 + case.states], 1)
