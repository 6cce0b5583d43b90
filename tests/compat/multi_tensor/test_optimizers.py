"""The optimizer steps against torch's own optimizers, or against their papers' formulas, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp.compat.multi_tensor import optimizers as mo
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
dtypes = pytest.mark.parametrize(("grad_dtype", "dtype"), DTYPES)


def flag(value: int = 0) -> Tensor:
    return torch.tensor([value], dtype=torch.int32)


def params_of(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in SHAPES]


def grads_of(dtype: torch.dtype, step: int) -> list[Tensor]:
    torch.manual_seed(step)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in SHAPES]


def state_of(dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32)) for shape in SHAPES]


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    # A parameter in bf16 is rounded at each step.
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance[one.dtype], atol=tolerance[one.dtype])


def by_torch(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], grad_dtype: torch.dtype, dtype: torch.dtype
) -> list[Tensor]:
    """Step one of torch's optimizers in fp64, from the same parameters and gradients."""
    params = [torch.nn.Parameter(param.double()) for param in params_of(dtype)]
    optimizer = make(params)
    for step in range(STEPS):
        for param, grad in zip(params, grads_of(grad_dtype, step), strict=True):
            param.grad = grad.double()
        optimizer.step()
    return [param.detach() for param in params]


@dtypes
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)]
)
def test_sgd(grad_dtype: torch.dtype, dtype: torch.dtype, momentum: float, dampening: float, nesterov: bool) -> None:
    params, momentums, copies = params_of(dtype), state_of(dtype), params_of(torch.float16)
    for step in range(STEPS):
        halved = [grad / 2 for grad in grads_of(grad_dtype, step)]
        lists = [halved, params, momentums, copies]
        mo.multi_tensor_sgd(1, flag(), lists, 0.1, momentum, dampening, 0.05, nesterov, step == 0, False, 2.0)
    options = {"lr": 0.05, "momentum": momentum, "dampening": dampening, "weight_decay": 0.1, "nesterov": nesterov}
    expected = by_torch(lambda those: torch.optim.SGD(those, **options), grad_dtype, dtype)
    assert_near(params, expected)
    for copy, param in zip(copies, expected, strict=True):
        torch.testing.assert_close(copy, param.half(), rtol=3e-2, atol=3e-2)


def test_sgd_with_decay_after_momentum() -> None:
    params, momentums = params_of(torch.float64), state_of(torch.float64)
    expected, buffers = params_of(torch.float64), state_of(torch.float64)
    for step in range(STEPS):
        grads = grads_of(torch.float64, step)
        mo.multi_tensor_sgd(1, flag(), [grads, params, momentums], 0.1, 0.9, 0.0, 0.05, False, step == 0, True, 1.0)
        buffers = [0.9 * buffer + grad for buffer, grad in zip(buffers, grads, strict=True)]
        expected = [w - 0.05 * (buffer + 0.1 * w) for w, buffer in zip(expected, buffers, strict=True)]
    assert_near(params, expected)
    assert_near(momentums, buffers)


@dtypes
@pytest.mark.parametrize(("mode", "kind"), [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
def test_adam(grad_dtype: torch.dtype, dtype: torch.dtype, mode: int, kind: Any) -> None:
    params, firsts, seconds = params_of(dtype), state_of(dtype), state_of(dtype)
    for step in range(STEPS):
        lists = [grads_of(grad_dtype, step), params, firsts, seconds]
        mo.multi_tensor_adam(1, flag(), lists, 0.02, 0.9, 0.99, 1e-8, step + 1, mode, 1, 0.1)
    options = {"lr": 0.02, "betas": (0.9, 0.99), "weight_decay": 0.1}
    assert_near(params, by_torch(lambda those: kind(those, **options), grad_dtype, dtype))


@dtypes
@pytest.mark.parametrize(("mode", "kind"), [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
@pytest.mark.parametrize("masters", [False, True])
def test_capturable_adam(
    grad_dtype: torch.dtype, dtype: torch.dtype, mode: int, kind: Any, masters: bool, half: torch.dtype
) -> None:
    params, firsts, seconds = params_of(dtype), state_of(dtype), state_of(dtype)
    models, call = [param.to(half) for param in params], mo.multi_tensor_adam_capturable
    lr, scale = torch.tensor(0.02), torch.tensor([0.25])
    for step in range(STEPS):
        grads = [grad * 4 for grad in grads_of(grad_dtype, step)]
        lists = [grads, models if masters else params, firsts, seconds, *([params] if masters else [])]
        if masters:
            call = mo.multi_tensor_adam_capturable_master
        number = torch.tensor([step + 1], dtype=torch.int32)
        call(1, flag(), lists, lr, 0.9, 0.99, 1e-8, number, mode, 1, 0.1, scale)
        for grad, true in zip(grads, grads_of(grad_dtype, step), strict=True):
            assert torch.equal(grad, true)
        kept = [[tensor.clone() for tensor in tensors] for tensors in lists]
        lists[0][0].fill_(float("inf"))
        kept[0][0].fill_(float("inf"))
        call(1, flag(1), lists, lr, 0.9, 0.99, 1e-8, number, mode, 1, 0.1, scale)
        torch.testing.assert_close(lists, kept, rtol=0, atol=0)
    options = {"lr": 0.02, "betas": (0.9, 0.99), "weight_decay": 0.1}
    expected = by_torch(lambda those: kind(those, **options), grad_dtype, dtype)
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(param.double(), other, rtol=tolerance, atol=tolerance)
    if masters and dtype is not torch.bfloat16:
        # A master that is rounded itself, and its parameter, are roundings of one value.
        assert all(torch.equal(model, param.to(half)) for model, param in zip(models, params, strict=True))


@pytest.mark.parametrize("copies", [False, True])
def test_mixed_lamb_is_lamb_by_unscaled_gradients(copies: bool, half: torch.dtype) -> None:
    runs: list[list[list[Tensor]]] = []
    models = params_of(half)
    for mixed in (False, True):
        params, firsts, seconds = params_of(torch.float32), state_of(torch.float32), state_of(torch.float32)
        for step in range(1, STEPS + 1):
            grads = grads_of(half, step)
            norm = torch.cat([grad.float().flatten() for grad in grads]).norm().reshape(1)
            head = (0.9, 0.99, 1e-6)
            if not mixed:
                args = (0.02, *head, step, 1, 0.1, 1, 1, norm, 0.5, True)
                mo.multi_tensor_lamb(1, flag(), [grads, params, firsts, seconds], *args)
                continue
            lists = [[grad * 8 for grad in grads], params, firsts, seconds, *([models] if copies else [])]
            one, count = torch.tensor([0.02]), torch.tensor([step], dtype=torch.int32)
            limit, inverse = torch.tensor([0.5]), torch.tensor([0.125])
            for found in (1.0, 0.0):
                args = (one, *head, count, 1, 0.1, 1, 1, norm, limit, True, torch.tensor([found]), inverse)
                mo.multi_tensor_lamb_mp(1, flag(), lists, *args)
                mo.multi_tensor_lamb_mp(1, flag(1), lists, *args)
        runs.append([params, firsts, seconds])
    torch.testing.assert_close(runs[0], runs[1])
    if copies:
        assert all(torch.equal(model, param.to(half)) for model, param in zip(models, runs[1][0], strict=True))


def test_adam_without_bias_correction() -> None:
    params, firsts, seconds = params_of(torch.float64), state_of(torch.float64), state_of(torch.float64)
    before, grads = params_of(torch.float64), grads_of(torch.float64, 0)
    mo.multi_tensor_adam(1, flag(), [grads, params, firsts, seconds], 0.02, 0.9, 0.99, 1e-8, 1, 1, 0, 0.0)
    expected = [w - 0.02 * 0.1 * grad / ((0.01 * grad**2).sqrt() + 1e-8) for w, grad in zip(before, grads, strict=True)]
    assert_near(params, expected)


@dtypes
def test_adagrad(grad_dtype: torch.dtype, dtype: torch.dtype) -> None:
    params, sums = params_of(dtype), state_of(dtype)
    for step in range(STEPS):
        mo.multi_tensor_adagrad(1, flag(), [grads_of(grad_dtype, step), params, sums], 0.1, 1e-8, 0, 0.1)
    options = {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.1}
    assert_near(params, by_torch(lambda those: torch.optim.Adagrad(those, **options), grad_dtype, dtype))


def test_adagrad_with_decoupled_decay() -> None:
    params, sums, before, grads = (
        *(params_of(torch.float64), state_of(torch.float64)),
        params_of(torch.float64),
        grads_of(torch.float64, 0),
    )
    mo.multi_tensor_adagrad(1, flag(), [grads, params, sums], 0.1, 1e-8, 1, 0.2)
    expected = [w - 0.1 * (grad / (grad.abs() + 1e-8) + 0.2 * w) for w, grad in zip(before, grads, strict=True)]
    assert_near(params, expected)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("norm_type", [2, 0])
@pytest.mark.parametrize("averaging", [1, 0])
def test_novograd(mode: int, norm_type: int, averaging: int) -> None:
    params, firsts, norms = params_of(torch.float64), state_of(torch.float64), torch.tensor([0.5, 1.5])
    expected, moments, blended = params_of(torch.float64), state_of(torch.float64), [0.5, 1.5]
    for step in range(STEPS):
        grads = grads_of(torch.float64, step)
        mo.multi_tensor_novograd(
            1,
            flag(),
            [grads, params, firsts],
            norms,
            0.02,
            0.9,
            0.8,
            1e-8,
            step + 1,
            1,
            0.1,
            averaging,
            mode,
            norm_type,
        )
        for place, grad in enumerate(grads):
            if norm_type == 2:
                blended[place] = (0.8 * blended[place] ** 2 + 0.2 * float(grad.norm()) ** 2) ** 0.5
            else:
                blended[place] = 0.8 * blended[place] + 0.2 * float(grad.abs().max())
            scale = blended[place] / (1 - 0.8 ** (step + 1)) ** 0.5 + 1e-8
            entering = grad / scale + 0.1 * expected[place] if mode == 0 else grad
            moments[place] = 0.9 * moments[place] + (0.1 if averaging else 1.0) * entering
            update = moments[place] / (1 - 0.9 ** (step + 1))
            if mode == 1:
                update = update / scale + 0.1 * expected[place]
            expected[place] = expected[place] - 0.02 * update
    torch.testing.assert_close(norms, torch.tensor(blended))
    # The norms are kept in fp32.
    for one, other in zip(params, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def lamb(
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[list[Tensor]],
    step: int,
    clip: float,
    decay: float,
    mode: int,
    trust: bool,
) -> list[Tensor]:
    """Take LAMB's step by its formula, in fp64; the moments are changed."""
    result = []
    for place, (w, raw) in enumerate(zip(params, grads, strict=True)):
        grad = raw / clip + (decay * w if mode == 0 else 0.0)
        moments[0][place] = 0.9 * moments[0][place] + 0.1 * grad
        moments[1][place] = 0.99 * moments[1][place] + 0.01 * grad**2
        update = moments[0][place] / (1 - 0.9**step) / ((moments[1][place] / (1 - 0.99**step)).sqrt() + 1e-6)
        update = update + (decay * w if mode == 1 else 0.0)
        result.append(w - 0.02 * (w.norm() / update.norm() if trust else 1.0) * update)
    return result


@dtypes
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(("decay", "nvlamb"), [(0.1, False), (0.0, False), (0.0, True)])
@pytest.mark.parametrize("limit", [0.5, 100.0, 0.0])
def test_lamb(grad_dtype: torch.dtype, dtype: torch.dtype, mode: int, decay: float, nvlamb: bool, limit: float) -> None:
    params, firsts, seconds = params_of(dtype), state_of(dtype), state_of(dtype)
    expected = [param.double().clone() for param in params]
    moments = [state_of(torch.float64), state_of(torch.float64)]
    for step in range(1, STEPS + 1):
        grads = grads_of(grad_dtype, step)
        lists = [grads, params, firsts, seconds]
        norm = torch.cat([grad.double().flatten() for grad in grads]).norm().reshape(1)
        args = (0.02, 0.9, 0.99, 1e-6, step, 1, decay, 1, mode, norm.float(), limit, nvlamb)
        mo.multi_tensor_lamb(1, flag(), lists, *args)
        clip = max(float(norm) / limit, 1.0) if limit else 1.0
        expected = lamb(
            expected, [grad.double() for grad in grads], moments, step, clip, decay, mode, bool(decay or nvlamb)
        )
    for one, other in zip(params, expected, strict=True):
        tolerance = 1e-5 if one.dtype is not torch.bfloat16 else 3e-2
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("copy_dtype", [torch.float32, torch.float16])
def test_lamb_in_two_stages(copy_dtype: torch.dtype) -> None:
    params, firsts, seconds = (params_of(torch.float32), state_of(torch.float32), state_of(torch.float32))
    moments = [state_of(torch.float64), state_of(torch.float64)]
    expected = [param.double().clone() for param in params]
    for step in range(STEPS):
        grads = grads_of(torch.float32, step)
        updates = [torch.zeros_like(param) for param in params]
        stage1 = [grads, params, firsts, seconds, updates]
        mo.multi_tensor_lamb_stage1(
            1, flag(), stage1, torch.tensor([0.1, 0.1]), step, 0.9, 0.99, 1e-6, torch.tensor([6.0]), 2.0
        )
        norms = [torch.stack([tensor.norm() for tensor in tensors]) for tensors in (params, updates)]
        mo.multi_tensor_lamb_stage2(1, flag(), [params, updates], *norms, 0.02, 0.1)
        expected = lamb(expected, [grad.double() for grad in grads], moments, step + 1, 3.0, 0.1, 1, True)
    assert_near(params, expected)


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "novograd", "lamb", "stage1"])
def test_state_in_half_is_written(name: str) -> None:
    halves, wide = ([grads_of(torch.float16, place) for place in range(6)] for _ in range(2))
    for lists in (halves, wide):
        lists[3] = [tensor.abs() for tensor in lists[3]]
        lists[2] = [tensor.abs() for tensor in lists[2]]
        lists[4] = [torch.ones(2)]
    wide[:4] = [[tensor.float() for tensor in tensors] for tensors in wide[:4]]
    CALLS[name](flag(), halves)
    CALLS[name](flag(), wide)
    for place in (1, 2, 3, 5):
        for one, other in zip(halves[place], wide[place], strict=True):
            torch.testing.assert_close(one, other.half())


@pytest.mark.parametrize(
    ("args", "ratio"),
    [((0.5,), 3.0), ((0.5, 0.1), 3.0), ((0.5, 0.0), 1.0), ((0.5, 0.0, True), 3.0), ((0.5, 0.0, False), 1.0)],
)
def test_lamb_ratio(args: tuple[Any, ...], ratio: float) -> None:
    params, updates = [torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2)]
    # The second parameter's norm is 0, so its ratio is 1.
    mo.multi_tensor_lamb_stage2(1, flag(), [params, updates], torch.tensor([6.0, 0.0]), torch.tensor([2.0, 2.0]), *args)
    assert params[0].tolist() == [1.0 - 0.5 * ratio] * 2
    assert params[1].tolist() == [0.5] * 2


CALLS: dict[str, Callable[[Tensor, list[list[Tensor]]], None]] = {
    "sgd": lambda noop, t: mo.multi_tensor_sgd(1, noop, t[:3], 0.1, 0.9, 0.0, 0.1, False, True, False, 1.0),
    "adam": lambda noop, t: mo.multi_tensor_adam(1, noop, t[:4], 0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.1),
    "adagrad": lambda noop, t: mo.multi_tensor_adagrad(1, noop, t[:3], 0.1, 1e-8, 0, 0.1),
    "novograd": lambda noop, t: mo.multi_tensor_novograd(
        1, noop, t[:3], t[4][0], 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.1, 1, 1, 2
    ),
    "lamb": lambda noop, t: mo.multi_tensor_lamb(1, noop, t[:4], 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.1, 1, 1, 3.0, 1.0),
    "stage1": lambda noop, t: mo.multi_tensor_lamb_stage1(
        1, noop, [*t[:4], t[5]], t[4][0], 1, 0.9, 0.9, 1e-8, 3.0, 1.0
    ),
    "stage2": lambda noop, t: mo.multi_tensor_lamb_stage2(1, noop, t[1:3], t[4][0], t[4][0], 0.1, 0.1),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_flag_holds_everything_back(name: str, dtype: torch.dtype) -> None:
    lists = [grads_of(dtype, place) for place in range(6)]
    lists[4] = [torch.ones(2)]
    lists[3] = [tensor.abs() for tensor in lists[3]]
    before = [[tensor.clone() for tensor in tensors] for tensors in lists]
    CALLS[name](flag(1), lists)
    torch.testing.assert_close(lists, before, rtol=0, atol=0)
    CALLS[name](flag(0), lists)
    changed = [
        place
        for place in range(6)
        if any(not torch.equal(*pair) for pair in zip(lists[place], before[place], strict=True))
    ]
    assert changed
    assert 0 not in changed, "gradients stay as they are"


@pytest.mark.parametrize("name", CALLS)
def test_lists_that_do_not_fit_change_nothing(name: str) -> None:
    lists = [grads_of(torch.float32, place) for place in range(6)]
    lists[2] = lists[2][:1]
    before = [[tensor.clone() for tensor in tensors] for tensors in lists]
    with pytest.raises(UsageError, match="of one length"):
        CALLS[name](flag(0), lists)
    torch.testing.assert_close(lists, before, rtol=0, atol=0)


@pytest.mark.parametrize("mode", [-1, 2])
def test_unknown_modes(mode: int) -> None:
    lists = [grads_of(torch.float32, place) for place in range(4)]
    for call in (
        lambda: mo.multi_tensor_adam(1, flag(), lists, 0.1, 0.9, 0.9, 1e-8, 1, mode, 1, 0.1),
        lambda: mo.multi_tensor_adagrad(1, flag(), lists[:3], 0.1, 1e-8, mode, 0.1),
        lambda: mo.multi_tensor_lamb(1, flag(), lists, 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.1, 1, mode, 3.0, 1.0),
        lambda: mo.multi_tensor_novograd(
            1, flag(), lists[:3], torch.ones(2), 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.1, 1, mode, 2
        ),
    ):
        with pytest.raises(UsageError, match=f"mode={mode}"):
            call()
    with pytest.raises(UsageError, match="norm_type=1"):
        mo.multi_tensor_novograd(1, flag(), lists[:3], torch.ones(2), 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.1, 1, 0, 1)
