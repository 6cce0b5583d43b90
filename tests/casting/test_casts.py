"""What is cast and to what, each thread's switch, and the cache on its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Parameter

from autoamp.casting.casters import SparseArgument
from autoamp.casting.casts import Casts
from autoamp.tensors import iter_tensors

HALVES = [torch.float16, torch.bfloat16]
CAST_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
KEPT_DTYPES = [
    torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
    torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def make(dtype: torch.dtype = torch.float16, device: str = "cpu", **settings: Any) -> Casts:
    casts = Casts(dtype, device, **settings)
    casts.open()
    return casts


def full_like(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.zeros(2, device=device).to(dtype)


# -- what is cast --


@pytest.mark.parametrize("source", CAST_DTYPES)
def test_floats_go_to_the_half_dtype(half: torch.dtype, device: str, source: torch.dtype) -> None:
    casts = make(half, device)
    tensor = full_like(source, device)
    cast = casts.to_half(tensor)
    assert cast.dtype == half
    assert cast.device == tensor.device
    assert (cast is tensor) == (source == half)
    assert casts.eligible(tensor)


@pytest.mark.parametrize("source", CAST_DTYPES)
def test_floats_go_to_fp32(half: torch.dtype, device: str, source: torch.dtype) -> None:
    tensor = full_like(source, device)
    cast = make(half, device).to_fp32(tensor)
    assert cast.dtype == torch.float32
    assert (cast is tensor) == (source == torch.float32)


@pytest.mark.parametrize("kept", KEPT_DTYPES, ids=str)
def test_other_dtypes_are_left_as_they_are(device: str, kept: torch.dtype) -> None:
    casts = make(device=device)
    tensor = full_like(kept, device)
    assert casts.to_half(tensor) is tensor
    assert casts.to_fp32(tensor) is tensor
    assert not casts.eligible(tensor)


def test_zero_dimensional_tensors_are_cast_and_scalars_are_not() -> None:
    casts = make()
    assert casts.to_half(torch.tensor(1.0)).dtype == torch.float16
    for scalar in (1, 2.5, True, 1j, None, "a", torch.float32, torch.Size([2])):
        assert casts.to_half(scalar) is scalar


def test_tensors_of_other_devices_are_left_as_they_are() -> None:
    casts = make()
    tensor = torch.zeros(2, device="meta")
    assert casts.to_half(tensor) is tensor
    assert not casts.eligible(tensor)
    parameter = Parameter(tensor)
    assert casts.to_half(parameter) is parameter


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_tensor_stops_the_cast(layout: torch.layout) -> None:
    casts = make()
    sparse = torch.eye(2).to_sparse(layout=layout, blocksize=(1, 1) if layout == torch.sparse_bsr else None)
    assert not casts.eligible(sparse)
    with pytest.raises(SparseArgument):
        casts.to_half(sparse)
    with pytest.raises(SparseArgument):
        casts.to_half([torch.ones(1), (sparse,)])
    assert casts.to_fp32(sparse) is sparse


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_cast(layout: torch.layout) -> None:
    tensor = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    cast = make().to_half(tensor)
    assert cast.is_nested
    assert cast.layout == layout
    assert cast.dtype == torch.float16


def test_gradients_flow_through_a_cast() -> None:
    casts = make()
    for leaf in (torch.ones(2, requires_grad=True), Parameter(torch.ones(2))):
        casts.to_half(leaf).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32


class Tagged(Tensor):
    """A subclass that knows what was called on it."""

    calls: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_keep_their_type() -> None:
    tensor = torch.ones(2).as_subclass(Tagged)
    assert type(make().to_half(tensor)) is Tagged
    assert Tensor.half in Tagged.calls


def test_fake_tensors() -> None:
    casts = make()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2, 3))
        cast = casts.to_half(fake)
        assert isinstance(cast, FakeTensor)
        assert cast.dtype == torch.float16
        layer = nn.Linear(3, 2)
        assert casts.to_half(layer.weight).dtype == torch.float16


def test_transforms_of_torch_func() -> None:
    casts = make()
    x = torch.ones(3, 2)
    assert torch.vmap(casts.to_half)(x).dtype == torch.float16
    gradient = torch.func.grad(lambda a: casts.to_half(a).float().square().sum())(x)
    assert torch.equal(gradient, 2 * x)
    hessian = torch.func.hessian(lambda a: casts.to_half(a).float().square().sum())(torch.ones(2))
    assert torch.equal(hessian, 2 * torch.eye(2))


def test_autocast_regions_cast_themselves() -> None:
    casts = make()
    tensor, parameter = torch.ones(2), Parameter(torch.ones(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert casts.autocast_rules()
        assert casts.to_half(tensor) is tensor
        assert casts.to_half(parameter) is parameter
        assert casts.promote([tensor, tensor.half()], {})[0][1].dtype == torch.float16
        assert not casts.eligible(tensor)
        with torch.autocast("cpu", enabled=False):
            assert casts.to_half(tensor).dtype == torch.float16
    assert not casts.autocast_rules()
    assert casts.to_half(tensor).dtype == torch.float16


# -- nests of arguments --

tensors = st.sampled_from([*CAST_DTYPES, *KEPT_DTYPES]).map(full_like)
parameters = st.sampled_from(CAST_DTYPES).map(lambda dtype: Parameter(full_like(dtype)))
nested = st.recursive(
    st.one_of(tensors, parameters, st.integers(), st.none(), st.text(max_size=2)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


def snapshot(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value), list(map(snapshot, value))
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    return id(value), getattr(value, "dtype", None), getattr(value, "_version", None)


@settings(deadline=None, max_examples=150)
@given(nested, st.sampled_from(HALVES))
def test_nests_are_never_mutated_and_get_the_right_dtypes(value: Any, half: torch.dtype) -> None:
    casts = make(half)
    for cast, target in ((casts.to_half, half), (casts.to_fp32, torch.float32)):
        before = snapshot(value)
        after = cast(value)
        assert snapshot(value) == before
        for old, new in zip(iter_tensors(value), iter_tensors(after), strict=True):
            assert new.dtype == (target if old.dtype in CAST_DTYPES else old.dtype)
            assert (new is old) == (new.dtype == old.dtype)


@settings(deadline=None, max_examples=150)
@given(nested)
def test_promotion_goes_to_fp32_where_dtypes_differ_and_nowhere_else(value: Any) -> None:
    before = snapshot(value)
    (after,), named = make().promote((value,), {"value": value})
    assert snapshot(value) == before
    assert [t.dtype for t in iter_tensors(named)] == [t.dtype for t in iter_tensors(after)]
    dtypes = {tensor.dtype for tensor in iter_tensors(value)} & set(CAST_DTYPES)
    if len(dtypes) < 2:
        assert after is value
    for old, new in zip(iter_tensors(value), iter_tensors(after), strict=True):
        widened = len(dtypes) > 1 and old.dtype in CAST_DTYPES
        assert new.dtype == (torch.float32 if widened else old.dtype)


def test_the_two_half_dtypes_promote_to_fp32() -> None:
    (a, b), _ = make().promote((full_like(torch.float16), full_like(torch.bfloat16)), {})
    assert a.dtype == b.dtype == torch.float32


# -- switches --


def test_switched_and_nested() -> None:
    casts = make()
    assert casts.local.on
    with casts.switched(False):
        assert not casts.local.on
        with casts.switched(True):
            assert casts.local.on
        assert not casts.local.on
    assert casts.local.on


def test_disabled_holds_whatever_is_within() -> None:
    casts = make()
    with casts.switched(False, forced_off=True):
        assert not casts.local.on
        with casts.switched(True):
            assert not casts.local.on
        with casts.switched(False, forced_off=True):
            assert not casts.local.on
        assert not casts.local.on
        with casts.switched(True, forced_off=False):
            assert casts.local.on
        assert not casts.local.on
    assert casts.local.on


@pytest.mark.parametrize(
    ("by_default", "switches"), [(True, (False,)), (True, (False, True)), (False, (True, False))],
    ids=["yielding", "forced off", "forced on"],
)  # fmt: skip
def test_a_switch_is_put_back_after_an_exception(by_default: bool, switches: tuple[bool, ...]) -> None:
    casts = make(on=by_default)

    def fail() -> None:
        with casts.switched(*switches):
            assert casts.local.on is not by_default
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert casts.local.on is by_default
    assert not vars(casts.local)


@pytest.mark.parametrize("outer", [(None, None), (False, None), (False, True), (True, False)])
@pytest.mark.parametrize("inner", [(None, None), (True, None), (False, True), (True, False), (True, True)])
def test_a_token_puts_back_both_switches(outer: tuple[Any, Any], inner: tuple[Any, Any]) -> None:
    casts = make()
    with casts.switched(*outer):
        before, asked = dict(vars(casts.local)), list(casts.deviations)
        token = casts.local.set(*inner)
        assert len(casts.deviations) == len(asked) + 1
        casts.local.reset(token)
        assert vars(casts.local) == before
        assert casts.deviations == asked


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("forced_off", [True, False])
def test_switches_are_set_in_another_thread_as_they_are_here(on: bool, forced_off: bool) -> None:
    casts = make()
    with casts.switched(on, forced_off):
        switches = casts.switches()

    def there() -> tuple[Any, Any]:
        with casts.switched(*switches):
            return casts.local.on, casts.local.forced_off

    assert in_thread(there) == (on, forced_off)


def test_a_function_with_casts_off_puts_back_what_was_there() -> None:
    casts = make()
    casts.open()

    def fail() -> None:
        assert casts.local.on is False
        raise KeyError

    for outer in ((None,), (True,), (False,)):
        with casts.switched(*outer):
            before, asked = dict(vars(casts.local)), list(casts.deviations)
            with pytest.raises(KeyError):
                casts.local.with_casts_off(fail)()
            assert vars(casts.local) == before
            assert casts.deviations == asked


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_switches_are_each_thread_s_own() -> None:
    casts = make()
    with casts.switched(False, forced_off=True):
        assert in_thread(lambda: casts.local.on)
    off = make(on=False)
    with off.switched(True, forced_off=False):
        assert off.local.on
        assert not in_thread(lambda: off.local.on)


def test_nothing_but_enabled_turns_on_a_thread_that_is_off_by_default() -> None:
    casts = make(on=False)

    def switched() -> bool:
        with casts.switched(True):
            return bool(casts.local.on)

    assert not switched()
    with casts.switched(True, forced_off=False):
        assert switched()
    assert not switched()


def test_shut_and_open_reach_every_thread() -> None:
    casts = make()
    casts.shut()
    assert not casts.local.on
    assert not in_thread(lambda: casts.local.on)
    casts.open()
    assert casts.local.on
    assert in_thread(lambda: casts.local.on)


def test_two_handles_have_switches_of_their_own() -> None:
    one, other = make(), make()
    one.shut()
    assert other.local.on
    with other.switched(False):
        one.open()
        assert one.local.on


# -- the cache on its own --


def test_cache_without_a_scope_keeps_nothing() -> None:
    casts = make()
    parameter = Parameter(torch.ones(2))
    assert casts.to_half(parameter) is not casts.to_half(parameter)
    assert len(casts.cache) == 0


def test_cache_holds_casts_to_half_alone() -> None:
    casts = make()
    casts.local.entries = {}
    parameter, half = Parameter(torch.ones(2)), Parameter(torch.ones(2, dtype=torch.bfloat16))
    assert casts.to_half(parameter) is not casts.to_half(parameter)
    assert casts.to_half(parameter) is casts.to_half(parameter)
    assert casts.to_half([parameter])[0] is casts.to_half({"weight": parameter})["weight"] is casts.to_half(parameter)
    assert casts.to_fp32(half) is not casts.to_fp32(half)
    assert len(casts.cache) == 1
    casts.cache.clear()
    assert len(casts.cache) == 0
    assert casts.local.entries == {}


def test_clear_outside_of_a_scope_opens_none() -> None:
    casts = make()
    casts.cache.clear()
    assert casts.local.entries is None


def test_cache_leaves_out_what_needs_no_cast_or_has_no_version() -> None:
    casts = make()
    casts.local.entries = {}
    for parameter in (Parameter(torch.ones(2, dtype=torch.float64)), Parameter(torch.ones(2).half())):
        assert casts.to_half(parameter) is parameter
    with torch.inference_mode():
        born_in_inference = Parameter(torch.ones(2), requires_grad=False)
        assert casts.to_half(born_in_inference) is not casts.to_half(born_in_inference)
    assert len(casts.cache) == 0


def test_no_wrapper_of_a_transform_outlives_it() -> None:
    casts = make()
    casts.local.entries = {}
    parameter, x = Parameter(torch.ones(2)), torch.ones(2)

    def transformed() -> None:
        torch.func.grad(lambda y: (y * casts.to_half(parameter) * casts.args_to_half([x])[0]).sum())(torch.ones(2))

    transformed()
    for cast in (casts.to_half(parameter), casts.args_to_half([x])[0]):
        assert not is_functorch_wrapped_tensor(cast)
    parameter.requires_grad_(False)
    with casts.cache.pin([parameter]):
        transformed()
        assert casts.cache.pins[id(parameter)].cast is None
        casts.to_half(parameter)
        assert casts.cache.pins[id(parameter)].cast is not None


# -- the last activation --


def shared(casts: Casts, tensor: Tensor) -> Tensor:
    (cast,) = casts.args_to_half([tensor])
    assert isinstance(cast, Tensor)
    return cast


def test_the_last_activation_is_cast_once() -> None:
    casts = make()
    casts.local.entries = {}
    x, other = torch.ones(2, requires_grad=True) * 1, torch.ones(2, requires_grad=True)
    assert shared(casts, x) is shared(casts, x)
    first = shared(casts, x)
    shared(casts, other)
    assert shared(casts, x) is not first
    casts.local.entries = None
    assert shared(casts, x) is not shared(casts, x)


def test_caching_off_shares_nothing() -> None:
    casts = make(enable_caching=False)
    x = torch.ones(2, requires_grad=True)
    assert shared(casts, x) is not shared(casts, x)


def set_to(tensor: Tensor, value: Tensor) -> None:
    tensor.data = value.clone()


@pytest.mark.parametrize(
    "write",
    [
        lambda x, value: x.copy_(value),
        lambda x, value: x.detach().copy_(value),
        lambda x, value: x[:1].copy_(value[:1]),
        lambda x, value: x.view(2, 1).mul_(0).add_(value.view(2, 1)),
        set_to,
        lambda x, value: x.set_(value.clone()),
    ],
    ids=["copy_", "detach", "slice", "view", "data", "set_"],
)
def test_an_activation_that_was_written_to_is_cast_anew(write: Callable[[Tensor, Tensor], Any]) -> None:
    casts = make()
    casts.local.entries = {}
    x = torch.zeros(2, requires_grad=True) * 1
    shared(casts, x)
    with torch.no_grad():
        write(x, torch.ones(2))
    assert torch.equal(shared(casts, x), x.half())


@pytest.mark.parametrize("first", ["grad", "no_grad", "inference_mode"])
@pytest.mark.parametrize("second", ["grad", "no_grad", "inference_mode"])
def test_an_activation_in_two_grad_modes(first: str, second: str) -> None:
    modes: dict[str, Any] = {
        "grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode,
    }  # fmt: skip
    casts = make()
    casts.local.entries = {}
    leaf = torch.ones(2, requires_grad=True)
    x = leaf * 1
    with modes[first]():
        shared(casts, x)
    with modes[second]():
        cast = shared(casts, x)
    assert cast.requires_grad == (second == "grad")
    if second == "grad":
        cast.float().sum().backward()
        assert leaf.grad is not None


def test_an_activation_without_a_version_is_cast_each_time() -> None:
    casts = make()
    casts.local.entries = {}
    with torch.inference_mode():
        x = torch.zeros(2)
        shared(casts, x)
        x.fill_(1.0)
        assert torch.equal(shared(casts, x), x.half())
    assert torch.equal(shared(casts, x.clone()), torch.ones(2).half())
    assert shared(casts, x) is not shared(casts, x)


def test_cache_holds_the_old_storage_so_that_its_address_stays_taken() -> None:
    casts = make()
    casts.local.entries = {}
    parameter = Parameter(torch.zeros(1000))
    assert casts.to_half(parameter) is not casts.to_half(parameter)
    assert len(casts.cache) == 1
    address = parameter.data_ptr()
    for value in range(1, 20):
        parameter.data = torch.full((1000,), float(value))
        assert parameter.data_ptr() != address
    assert torch.equal(casts.to_half(parameter), torch.full((1000,), 19.0).half())
