"""The policies: what a replacement does with its arguments, ``out=``, in-place forms and banned functions."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import autoamp
from autoamp.core import CastPolicy, CastState, build_replacement, runtime_of

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LISTS: dict[str, Any] = {
    "extends": [],
    "fp16": ["linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "einsum", "multi_dot", "chain_matmul", "conv2d"],
    "fp32": [
        "softmax", "log_softmax", "exp", "pow", "__pow__", "__rpow__", "sum", "norm", "layer_norm", "cross_entropy",
        "cumsum", "slogdet", "reciprocal",
    ],
    "promote": ["cat", "stack", "addcmul", "scatter_add", "index_put", "tensordot", "dot"],
    "banned": {"binary_cross_entropy": "use binary_cross_entropy_with_logits", "log": "add a little first"},
}  # fmt: skip


def start(dtype: torch.dtype = HALF, device: str = "cpu", **settings: Any) -> autoamp.Handle:
    handle = autoamp.init(device_type=device, dtype=dtype, lists=LISTS, **settings)
    assert isinstance(handle, autoamp.Handle)
    return handle


@pytest.fixture
def handle() -> autoamp.Handle:
    return start()


def build_one(function: Any, policy: CastPolicy, casts: CastState | None = None, **more: Any) -> Any:
    if casts is None:
        casts = CastState(HALF, "cpu")
        casts.enable()
    return build_replacement(function, policy, casts, module=__name__, qualname="function", **more)


# -- fp16 and fp32 --


def test_every_argument_by_keyword(handle: autoamp.Handle) -> None:
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    reference = F.linear(x, w, b)
    assert reference.dtype == HALF
    assert torch.equal(F.linear(input=x, weight=w, bias=b), reference)
    assert torch.equal(F.linear(x, bias=b, weight=w), reference)
    assert F.layer_norm(input=x.half(), normalized_shape=(4,), weight=w[0].half(), bias=None).dtype == FP32
    assert torch.addmm(input=b, mat1=x, mat2=w.t(), beta=1, alpha=2).dtype == HALF


def test_scalars_and_zero_dimensional_tensors(handle: autoamp.Handle) -> None:
    x = torch.full((2,), 3.0, dtype=HALF)
    for power in (x**2, torch.pow(x, 2), x.pow(2), x ** torch.tensor(2.0), 2**x, torch.tensor(2.0, dtype=HALF) ** x):
        assert power.dtype == FP32
    assert torch.exp(torch.tensor(1.0, dtype=HALF)).dtype == FP32
    assert torch.pow(2, x).dtype == FP32


TAKE_DTYPE = {
    "cumprod": lambda x: x.cumprod(1),
    "linalg.matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "linalg.norm": lambda x: torch.linalg.norm(x, 2, 1),
    "linalg.vector_norm": lambda x: torch.linalg.vector_norm(x, 1, dim=0),
    "nansum": lambda x: torch.nansum(x, 1),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: torch.norm(x, p=2, dim=1, dtype=None),
    "prod": lambda x: torch.prod(x, 1),
    "softmax": lambda x: F.softmax(x, -1),
    "softmax by position": lambda x: torch.softmax(x, 1, None),
    "sum": lambda x: x.sum(1, keepdim=True),
    "sum of all": lambda x: torch.sum(x),
}


def saved_of(call: Any, x: Tensor) -> tuple[Tensor, list[torch.dtype]]:
    """What a call returns, and the dtypes of what it keeps for backward."""
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call(x)
    return result, saved


@pytest.mark.parametrize("name", TAKE_DTYPE)
def test_ops_that_take_dtype_compute_in_fp32_and_keep_the_half(half: torch.dtype, name: str) -> None:
    handle = autoamp.init(device_type="cpu", dtype=half, lists="default")
    call, x = TAKE_DTYPE[name], (torch.rand(8, 16) + 0.5).to(half).requires_grad_()
    result, saved = saved_of(call, x)
    with handle.disable_casts():
        reference, saved_in_fp32 = saved_of(call, wide := x.detach().float().requires_grad_())
    assert result.dtype == FP32
    assert torch.equal(result, reference)
    # The argument is kept as it came; of softmax and a sum nothing of it is.
    of_argument = saved_in_fp32[: 1 if len(saved_in_fp32) > 1 or name == "nansum" else 0]
    assert saved[: len(of_argument)] == [half] * len(of_argument)
    weights = torch.rand(result.shape)
    (result * weights).sum().backward()
    (reference * weights).sum().backward()
    torch.testing.assert_close(x.grad.float(), wide.grad, rtol=4 * torch.finfo(half).eps, atol=1e-3)


NORMS: dict[str, Any] = {
    "linalg.matrix_norm": (lambda x, order: torch.linalg.matrix_norm(x, order), ["fro", 1, -1, math.inf, -math.inf]),
    "linalg.norm": (lambda x, order: torch.linalg.norm(x, order), [None, "fro", 1, -1, math.inf, -math.inf]),
    "linalg.norm of a row": (lambda x, order: torch.linalg.norm(x[0], order), [None, 0, 1, 2, math.inf, -math.inf]),
    "linalg.norm by name": (lambda x, order: torch.linalg.norm(x, ord=order, dim=1), [0, 2]),
    "linalg.vector_norm": (lambda x, order: torch.linalg.vector_norm(x, order), [0, 1, 2, math.inf, -math.inf]),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_whose_gradients_are_no_powers_keep_the_half(half: torch.dtype, name: str) -> None:
    autoamp.init(device_type="cpu", dtype=half, lists="default")
    call, orders = NORMS[name]
    x = (torch.rand(4, 8) + 0.5).to(half).requires_grad_()
    for order in orders:
        result, saved = saved_of(lambda x: call(x, order), x)  # noqa: B023
        assert result.dtype == FP32
        assert saved[0] == half, order


@pytest.mark.parametrize("order", [3, -1, 0.5, "nuc"])
def test_norms_whose_gradients_are_powers_keep_fp32(order: Any) -> None:
    autoamp.init(device_type="cpu", dtype=HALF, lists="default")
    x = (torch.eye(4) * 300).half().requires_grad_()
    result, saved = saved_of(
        lambda x: torch.norm(x, order) if order == "nuc" else torch.linalg.vector_norm(x, order), x
    )
    assert result.dtype == FP32
    assert set(saved) == {FP32}
    if order == 3:
        result.backward()
        assert x.grad.isfinite().all()
    # Norms by singular values.
    x = torch.diag(torch.tensor([3.0, 4.0])).half()
    for norm in (torch.linalg.norm, torch.linalg.matrix_norm):
        assert norm(x, 2).item() == pytest.approx(4.0)
        assert norm(x, "nuc").item() == pytest.approx(7.0)
        assert norm(x, -2).dtype == FP32


def test_a_dtype_that_is_asked_for_is_heeded(half: torch.dtype) -> None:
    autoamp.init(device_type="cpu", dtype=half, lists="default")
    x = torch.rand(3, 4).to(half)
    for source, dtype in itertools.product((x, x.float()), (half, FP32, FP64)):
        for result in (
            source.sum(dtype=dtype),
            torch.softmax(source, 1, dtype),
            F.log_softmax(source, 1, 3, dtype),
            source.prod(dtype=dtype),
            torch.cumsum(source, 0, dtype=dtype),
        ):
            assert result.dtype == dtype
    assert x.sum(dtype=torch.int64).dtype == torch.int64
    # Arguments by name are cast as any.
    assert torch.sum(input=x).dtype == F.softmax(input=x, dim=1).dtype == FP32


def test_sparse_in_place_and_promotion_go_through_as_they_came(handle: autoamp.Handle) -> None:
    sparse, dense = torch.eye(3).to_sparse(), torch.randn(3, 3)
    assert torch.cat([sparse, sparse.half()]).layout == torch.sparse_coo
    x = torch.zeros(3, 3)
    assert x.addmm_(sparse, dense) is x
    out = torch.empty(3, 3)
    assert torch.mm(sparse, dense, out=out) is out
    assert torch.equal(x, dense)
    assert torch.equal(out, dense)


def test_tensors_of_other_devices_are_left_as_they_are(handle: autoamp.Handle) -> None:
    x = torch.empty(3, 3, device="meta")
    assert (x @ x).dtype == FP32
    assert torch.exp(x.half()).dtype == HALF
    assert torch.cat([x, x.half()]).dtype == FP32
    with FakeTensorMode():
        layer = torch.nn.Linear(3, 3)
        assert layer(torch.empty(2, 3)).dtype == HALF
        assert torch.softmax(torch.empty(2, 3).half(), -1).dtype == FP32


def test_subclasses_and_function_modes_see_the_original_function_and_its_casts() -> None:
    seen: list[Any] = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    original = torch.mm
    start()
    result = torch.mm(torch.randn(2, 2).as_subclass(Watched), torch.randn(2, 2))
    assert type(result) is Watched
    assert result.dtype == HALF
    assert original in seen
    seen.clear()
    with Mode():
        assert torch.mm(torch.randn(2, 2), torch.randn(2, 2)).dtype == HALF
    assert seen.count(original) == 1
    assert seen.count(Tensor.half) == 2


def test_a_composite_function_is_fp32_throughout(handle: autoamp.Handle) -> None:
    x, casts = torch.randn(3, 3).half(), runtime_of(handle).casts

    def attention(q: Tensor, k: Tensor) -> Tensor:
        assert q.dtype == k.dtype == FP32
        return torch.mm(q, k)

    replacement = build_one(attention, CastPolicy.FP32, casts)
    assert replacement(x, k=x).dtype == FP32
    assert casts.thread.mode.on is True
    assert torch.mm(x, x).dtype == HALF
    with pytest.raises(RuntimeError, match="shape"):
        replacement(x, k=x[:2])
    assert torch.mm(x.float(), x.float()).dtype == HALF
    for on, dtype in ((True, HALF), (False, FP32)):
        with casts.switched(on):
            replacement(x.float(), x.float())
            assert torch.mm(x.float(), x.float()).dtype == dtype
    # Under fp16 the arguments are half, and the body goes by the lists.
    assert build_one(lambda q: torch.exp(q), CastPolicy.FP16, casts)(x.float()).dtype == FP32


def test_torch_s_own_composite_functions_too() -> None:
    lists = {
        **LISTS,
        "fp32": [*LISTS["fp32"], "multi_head_attention_forward", "torch.nn.LSTM"],
        "fp16": ["linear", "lstm"],
    }
    autoamp.init(device_type="cpu", dtype=HALF, lists=lists)
    attention = torch.nn.MultiheadAttention(4, 2)
    x = torch.randn(3, 1, 4)
    assert attention(x, x, x)[0].dtype == FP32
    assert torch.nn.LSTM(4, 4)(x.half())[0].dtype == FP32
    assert F.linear(x, torch.randn(4, 4)).dtype == HALF


def test_methods_partials_and_callable_objects() -> None:
    class Owner:
        @staticmethod
        def static(x: Tensor) -> torch.dtype:
            return x.dtype

        @classmethod
        def of_class(cls, x: Tensor) -> tuple[type, torch.dtype]:
            return cls, x.dtype

        def __call__(self, x: Tensor) -> torch.dtype:
            return x.dtype

    Owner.static = build_one(vars(Owner)["static"], CastPolicy.FP16)  # type: ignore[method-assign]
    Owner.of_class = build_one(vars(Owner)["of_class"], CastPolicy.FP16)  # type: ignore[method-assign]
    assert Owner.static(torch.ones(1)) == Owner().static(torch.ones(1)) == HALF
    assert Owner.of_class(torch.ones(1)) == (Owner, HALF)
    assert build_one(functools.partial(torch.mul, other=1), CastPolicy.FP16)(torch.ones(1)).dtype == HALF
    assert build_one(Owner(), CastPolicy.FP32)(torch.ones(1).half()) == FP32


# -- promote --


def test_promotion(handle: autoamp.Handle) -> None:
    h, f = torch.ones(3, dtype=HALF), torch.ones(3)
    assert torch.cat([h, f]).dtype == FP32
    assert torch.stack((h, f), dim=1).dtype == FP32
    assert torch.cat(tensors=[h, h], dim=0).dtype == HALF
    assert torch.dot(h, f).dtype == FP32
    assert torch.cat([h, h.to(BF16)]).dtype == FP32
    assert torch.cat([h, h.double()]).dtype == FP64
    assert torch.tensordot(torch.ones(2, 2), torch.ones(2, 2, dtype=HALF)).dtype == FP32
    index = torch.zeros(3, dtype=torch.int64)
    assert torch.scatter_add(f, 0, index, h).dtype == FP32
    assert h.index_put((index,), f).dtype == FP32


# -- out= --


def test_out_takes_the_value_in_its_own_dtype(handle: autoamp.Handle) -> None:
    h = torch.randn(3, 5).half()
    expected = torch.exp(h.float())
    other_sizes = torch.empty(0), torch.empty(4, 5)
    for out in (torch.empty(3, 5), torch.empty(3, 5, dtype=HALF), torch.empty(3, 5).double(), *other_sizes, h):
        dtype = out.dtype
        assert torch.exp(h, out=out) is out
        assert torch.equal(out, expected.to(dtype))
    x = torch.randn(2, 2)
    assert torch.mm(x, x, out=None).dtype == HALF
    assert torch.cat([x, x.half()], out=None).dtype == FP32


def test_products_that_write_are_computed_in_what_they_write_to(half: torch.dtype) -> None:
    autoamp.init(device_type="cpu", dtype=half)
    wide, a, b, c = torch.randn(3, 4), torch.randn(3, 4).to(half), torch.randn(4, 5), torch.randn(3, 5)
    low, narrow = b.to(half), torch.empty(3, 5, dtype=half)
    with autoamp.disable_casts():
        of_wide, exact, of_low = wide @ b, a.float() @ b, a.float() @ low.float()
    for found, expected in (
        (torch.mm(wide, b, out=torch.empty(3, 5)), of_wide),
        (torch.mm(a, b, out=torch.empty(3, 5)), exact),
        (torch.addmm(c, a, b, beta=0, out=torch.empty(0)), exact),
        (torch.matmul(a, low, out=torch.empty(3, 5)), of_low),
        (torch.zeros(3, 5).addmm_(a, b), exact),
        (torch.zeros(3).addmv_(a, b[:, 0]), exact[:, 0]),
        (torch.zeros(1, 3, 5).baddbmm_(a[None], low[None]), of_low[None]),
        # What is half keeps its dtype, too.
        (torch.zeros(3, 5, dtype=half).addmm_(a, b), exact.to(half)),
    ):
        torch.testing.assert_close(found, expected)
    assert torch.mm(a, low, out=narrow) is narrow
    # Dtypes that do not fit are torch's to refuse.
    with pytest.raises(RuntimeError):
        torch.mm(wide, b, out=narrow)


def test_out_of_several_tensors_and_of_promoted_and_python_functions(handle: autoamp.Handle) -> None:
    sign, logarithm = torch.empty((), dtype=HALF), torch.empty(())
    result = torch.linalg.slogdet(torch.eye(2, dtype=HALF) * 2, out=(sign, logarithm))
    assert result.sign is sign
    assert result.logabsdet is logarithm
    assert sign.item() == 1
    assert logarithm.item() == pytest.approx(1.386294, abs=1e-6)
    h, out, norm = torch.ones(2, dtype=HALF), torch.empty(4, dtype=HALF), torch.empty((), dtype=HALF)
    assert torch.cat([h, torch.ones(2)], out=out) is out
    assert torch.equal(out, torch.ones(4, dtype=HALF))
    assert torch.norm(h, out=norm) is norm
    assert norm.item() == pytest.approx(1.414, abs=1e-3)


def test_out_errors_are_torch_s_own(handle: autoamp.Handle) -> None:
    x = torch.randn(2, 2)
    leaf = torch.randn(2, 2, requires_grad=True)
    for function in (torch.mm, torch.pow):
        for args, out in (((leaf, x), torch.empty(2, 2)), ((x, x), leaf * 1), ((x, x), leaf)):
            with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
                function(*args, out=out)
        with torch.no_grad():
            assert function(leaf, x, out=torch.empty(2, 2)).dtype == FP32
        with pytest.raises(RuntimeError):
            function(x, x, out=torch.empty(2, 2, dtype=torch.int64))
        with pytest.raises(RuntimeError):
            function(x, x, out=torch.empty(2, 2, device="meta"))


# -- in-place forms --


def test_in_place_keeps_self_s_dtype_and_computes_as_the_list_says(handle: autoamp.Handle) -> None:
    h = torch.randn(4).half()
    reference = h.float().exp().half()
    for function in (lambda x: x.exp_(), torch.exp_, lambda x: torch.exp_(input=x)):
        x = h.clone()
        assert function(x) is x
        assert torch.equal(x, reference)
    x = y = torch.full((2,), 3.0, dtype=HALF)
    y **= 2
    assert y is x
    assert torch.equal(x, torch.full((2,), 9.0, dtype=HALF))
    big = torch.full((2,), 300.0, dtype=HALF)
    # 300 ** 2 overflows half: what it is in fp32 is rounded once, to inf.
    assert torch.equal(big.clone().pow_(2).pow_(0.5), torch.full((2,), torch.inf, dtype=HALF))
    assert torch.equal((big**2).pow_(0.5), torch.full((2,), 300.0))


def test_a_rule_casts_an_in_place_form_to_half_where_it_names_that_form(half: torch.dtype) -> None:
    value = torch.full((2, 2), 1 + 2.0**-12)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.abs_(), lambda x: x.mul_(1), lambda x: x.addmm_(x, torch.zeros(2, 2, dtype=half)),
        lambda x: torch.abs(x, out=x.clone()), lambda x: torch.mm(x, torch.eye(2, dtype=half), out=x.clone()),
    ]  # fmt: skip
    autoamp.init(device_type="cpu", dtype=half, lists={"extends": [], "fp16": ["abs", "mul", "addmm", "mm"]})
    assert value.abs().dtype is half
    for call in calls:
        assert torch.equal(call(value.clone()), value)
    autoamp.init(device_type="cpu", dtype=half, lists={"extends": [], "fp16": ["abs_", "mul_", "addmm_"]})
    for call in calls[:3]:
        result = call(value.clone())
        assert result.dtype is FP32
        assert torch.equal(result, value.to(half).float())


def test_in_place_promotion(handle: autoamp.Handle) -> None:
    h, f = torch.ones(3, dtype=HALF), torch.full((3,), 2.0)
    index = torch.tensor([0, 1, 1])
    calls = [
        (h, lambda x: x.addcmul_(f, f), [5.0, 5.0, 5.0]),
        (h, lambda x: x.scatter_add_(0, index, f), [3.0, 5.0, 1.0]),
        (f, lambda x: x.scatter_add_(0, index, h), [3.0, 4.0, 2.0]),
        (h, lambda x: x.index_put_((index,), f), [2.0, 2.0, 1.0]),
        (h, lambda x: x.index_put_((index,), f, accumulate=True), [3.0, 5.0, 1.0]),
    ]
    for start_value, call, result in calls:
        x = start_value.clone()
        assert call(x) is x
        assert x.dtype == start_value.dtype
        assert x.tolist() == result


def test_in_place_errors_are_torch_s_own(handle: autoamp.Handle) -> None:
    for shape in ((1, 3), (3,)):
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            torch.ones(shape, dtype=HALF).pow_(torch.ones(2, 3, dtype=HALF))
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.ones(2, dtype=torch.int64).pow_(torch.ones(2, dtype=HALF))
    with pytest.raises(TypeError):
        torch.exp_()  # type: ignore[call-arg]
    for dtype in (HALF, FP32):
        leaf = torch.ones(2, dtype=dtype, requires_grad=True)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            leaf.exp_()
        assert torch.equal(leaf, torch.ones(2, dtype=dtype))
        with torch.no_grad():
            assert leaf.exp_() is leaf


# -- banned --


def test_banned_runs_in_fp32_and_warns_once(handle: autoamp.Handle) -> None:
    p, target = torch.rand(4).half(), torch.rand(4).half()
    with pytest.warns(
        UserWarning, match="binary_cross_entropy is unsafe.*use binary_cross_entropy_with_logits"
    ) as caught:
        loss = F.binary_cross_entropy(p, target)
    assert caught[0].filename == __file__
    assert torch.equal(loss, F.binary_cross_entropy(p.float(), target.float()))
    assert loss.dtype == FP32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert F.binary_cross_entropy(input=p, target=target).dtype == FP32
        assert torch.nn.BCELoss()(p, target.float()).dtype == FP32


@pytest.mark.parametrize("counts", [False, True])
def test_banned_names_the_line_of_the_user(counts: bool, half: torch.dtype) -> None:
    handle = start(dtype=half)
    p, target = torch.rand(4).to(half), torch.rand(4)
    criterion = torch.nn.BCELoss()
    calls = [lambda: F.binary_cross_entropy(p, target), lambda: criterion(p, target)]
    line = sys._getframe().f_lineno - 1
    with handle.count() if counts else contextlib.nullcontext():
        for call in calls:
            runtime_of(handle).casts.warned.clear()
            with pytest.warns(UserWarning, match="is unsafe") as caught:
                call()
            assert (caught[0].filename, caught[0].lineno) == (__file__, line)


@pytest.mark.filterwarnings("ignore:.*is unsafe")
def test_banned_compiles(handle: autoamp.Handle) -> None:
    compiled = torch.compile(F.binary_cross_entropy, backend="eager")
    p, target = torch.rand(4).half(), torch.rand(4)
    assert torch.equal(compiled(p, target), F.binary_cross_entropy(p.float(), target))


def test_banned_is_silent_without_half_arguments(handle: autoamp.Handle) -> None:
    p, target = torch.rand(4), torch.rand(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert F.binary_cross_entropy(p, target).dtype == FP32
        assert F.binary_cross_entropy(p.double(), target.double()).dtype == FP64
        with handle.disable_casts():
            assert torch.log(p.half()).dtype == HALF
        with torch.autocast("cpu", dtype=HALF):
            assert torch.log(p.half()).dtype == HALF


def test_banned_raises_where_it_is_not_allowed() -> None:
    start(allow_banned=False)
    p, target = torch.rand(4), torch.rand(4)
    message = (
        r"binary_cross_entropy is banned in half precision: use binary_cross_entropy_with_logits.*allow_banned=True"
    )
    for args in ((p.half(), target), (p, target.half())):
        with pytest.raises(autoamp.BannedFunctionError, match=message):
            F.binary_cross_entropy(*args)
    assert F.binary_cross_entropy(p, target).dtype == FP32
    with pytest.raises(NotImplementedError, match=r"torch\.Tensor\.log_"):
        p.half().log_()


@pytest.mark.filterwarnings("ignore:.*log_ is unsafe:UserWarning")
def test_banned_in_place_and_out(handle: autoamp.Handle) -> None:
    x = torch.full((2,), 2.0, dtype=HALF)
    reference = x.float().log().half()
    assert torch.log_(x) is x
    assert torch.equal(x, reference)
    out = torch.empty(2, dtype=HALF)
    with pytest.warns(UserWarning, match="torch.log is unsafe"):
        assert torch.log(torch.full((2,), 2.0, dtype=HALF), out=out) is out
    assert torch.equal(out, reference)
