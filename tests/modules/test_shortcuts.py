"""Modules called without their ``forward``: with its results, and with ``forward`` wherever anybody could tell."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import wrapt
from torch import Tensor, fx, nn
from torch.nn import Module
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode

import autoamp
from autoamp.modules.shortcuts import build_shortcuts, skips_call_impl

HALF = torch.bfloat16

CASES: dict[str, tuple[Callable[[], Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), (3, 6)),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), (2, 3, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, groups=2), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, dilation=2), (2, 4, 9, 8)),
    "conv2d without bias": (lambda: nn.Conv2d(4, 6, 3, padding="same", bias=False), (2, 4, 9, 8)),
    "conv2d of one image": (lambda: nn.Conv2d(4, 6, 3), (4, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 3), (1, 2, 5, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm((3, 6)), (2, 3, 6)),
    "layer norm without weights": (lambda: nn.LayerNorm(6, elementwise_affine=False), (2, 6)),
    "layer norm without bias": (lambda: nn.LayerNorm(6, bias=False), (2, 6)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(6), (4, 6)),
    "batch norm 1d of sequences": (lambda: nn.BatchNorm1d(6), (4, 6, 3)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(4), (2, 4, 3, 3)),
    "batch norm 2d without weights": (lambda: nn.BatchNorm2d(4, affine=False), (2, 4, 3, 3)),
    "batch norm 3d": (lambda: nn.BatchNorm3d(4), (2, 4, 3, 3, 3)),
}
"""Modules that are called directly, each with the shape of an input."""


class Around(nn.Module):
    """A module around another, so that its shortcut is taken: the outermost call takes none."""

    def __init__(self, inner: Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def handle(request: pytest.FixtureRequest) -> Iterator[autoamp.Handle]:
    handle = autoamp.init(device_type="cpu", dtype=request.param)
    assert isinstance(handle, autoamp.Handle)
    yield handle
    handle.deactivate()


@pytest.fixture
def bf16() -> Iterator[autoamp.Handle]:
    handle = autoamp.init(device_type="cpu", dtype=HALF)
    assert isinstance(handle, autoamp.Handle)
    yield handle
    handle.deactivate()


def forwards(module: Module, *args: Any, **kwargs: Any) -> int:
    """Return how many times a module's own ``forward`` runs when the module is called within another."""
    code, count = module.forward.__code__, 0  # type: ignore[attr-defined]

    def look(frame: types.FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code is code

    outer = Around(module)
    sys.setprofile(look)
    try:
        outer(*args, **kwargs)
    finally:
        sys.setprofile(None)
    return count


def trained(module: Module, x: Tensor) -> list[Tensor]:
    """Return the result, the gradients and the buffers of two steps."""
    x = x.clone().requires_grad_()
    results = [module(x) for _ in range(2)]
    sum(result.float().square().sum() for result in results).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    return [*results, x.grad, *(p.grad for p in module.parameters() if p.grad is not None), *module.buffers()]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_results_are_those_of_forward(handle: autoamp.Handle, name: str, training: bool) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    module, x = make().train(training), torch.randn(shape)
    assert forwards(copy.deepcopy(module), x) == 0
    by_forward = copy.deepcopy(module)
    by_forward.forward = types.MethodType(type(module).forward, by_forward)  # type: ignore[method-assign]
    assert forwards(copy.deepcopy(by_forward), x) == 1
    for one, other in zip(trained(Around(module), x), trained(Around(by_forward), x), strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one, other)


def test_what_torch_has(bf16: autoamp.Handle) -> None:
    assert skips_call_impl()
    assert {type(make()) for make, _ in CASES.values()} == set(build_shortcuts())


def test_an_unknown_implementation_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def implementation(self: Any, *args: Any) -> Any:
        return self.forward(*args) if not self._hooks_of_the_future else None

    monkeypatch.setattr(Module, "_call_impl", implementation)
    assert not skips_call_impl()
    monkeypatch.setattr(Module, "_call_impl", torch.relu)
    assert not skips_call_impl()


def _subclass(module: Module) -> None:
    class Mine(type(module)):  # type: ignore[misc]
        pass

    module.__class__ = Mine


def _own_forward(module: Module) -> None:
    module.forward = types.MethodType(type(module).forward, module)  # type: ignore[method-assign]


def _shadow(module: Module) -> None:
    vars(module)["weight"] = module.weight.detach() * 2.0  # type: ignore[operator]


def _plain_weight(module: Module) -> None:
    weight = module.weight.detach() * 2.0  # type: ignore[operator]
    del module.weight
    module.weight = weight


ODD: dict[str, Callable[[Module], Any]] = {
    "a subclass": _subclass,
    "a forward of its own": _own_forward,
    "a weight in __dict__": _shadow,
    "a weight that is no parameter": _plain_weight,
    "an implementation of its own": lambda module: setattr(module, "_call_impl", lambda x: module.forward(x)),
    "a hook": lambda module: module.register_forward_hook(lambda *_: None),
    "a hook before": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "a hook of backward": lambda module: module.register_full_backward_hook(lambda *_: None),
    "a hook before backward": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.5),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["linear", "conv2d", "layer norm", "batch norm 2d"])
def test_forward_runs_where_something_is_out_of_the_ordinary(bf16: autoamp.Handle, name: str, odd: str) -> None:
    make, shape = CASES[name]
    module, x = make(), torch.randn(shape)
    ODD[odd](module)
    with autoamp.disable_casts():
        expected = module.forward(x)
        torch.testing.assert_close(Around(module)(x), expected)
    assert forwards(module, x) == 1


@pytest.mark.parametrize("name", ["linear", "conv2d", "layer norm", "batch norm 2d"])
def test_inputs_that_are_no_plain_tensor(bf16: autoamp.Handle, name: str) -> None:
    class Mine(Tensor):
        pass

    make, shape = CASES[name]
    module, x = make(), torch.randn(shape)
    assert forwards(module, x.as_subclass(Mine)) == 1
    assert forwards(module, input=x) == 1
    assert forwards(module, nn.Parameter(x)) == 1


@pytest.mark.parametrize("name", ["linear", "conv2d", "layer norm", "batch norm 2d"])
def test_a_class_whose_forward_somebody_replaced(
    bf16: autoamp.Handle, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = CASES[name]
    module, x = make(), torch.randn(shape)
    original = type(module).forward
    monkeypatch.setattr(type(module), "forward", lambda self, x: original(self, x) + 100.0)
    assert Around(module)(x).min() > 50.0


METHODS = [
    (nn.Linear, "forward"),
    (nn.Conv2d, "forward"),
    (nn.Conv2d, "_conv_forward"),
    (nn.LayerNorm, "forward"),
    (nn.BatchNorm2d, "forward"),
    (nn.BatchNorm2d, "_check_input_dim"),
    (F, "layer_norm"),
    (F, "batch_norm"),
    (Module, "_call_impl"),
    (Module, "__getattr__"),
]


WHEN = [(owner, name, when) for owner, name in METHODS for when in ("before", "after")]


@pytest.mark.parametrize("rebuilt", [False, True], ids=["built once", "built anew"])
@pytest.mark.parametrize(("owner", "name", "when"), WHEN, ids=lambda value: getattr(value, "__name__", value))
def test_what_somebody_replaced_is_called(
    owner: Any, name: str, when: str, rebuilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = getattr(owner, name), []

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        seen.append(type(args[0]))
        return original(*args, **kwargs)

    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.LayerNorm(3), nn.Linear(3, 3))
    if when == "before":
        monkeypatch.setattr(owner, name, replaced)
    with autoamp.region(device_type="cpu", dtype=HALF, lists={"extends": [], "fp16": ["linear"]}) as handle:
        if when == "after":
            monkeypatch.setattr(owner, name, replaced)
        if rebuilt:
            with handle.count():
                model(torch.randn(2, 4, 3, 3))
        else:
            model(torch.randn(2, 4, 3, 3))
    assert set(seen) & {nn.Linear, nn.Conv2d, nn.LayerNorm, nn.BatchNorm2d, Tensor}


@pytest.mark.parametrize("name", ["_conv_forward", "_check_input_dim"])
def test_methods_of_an_instance_are_called(bf16: autoamp.Handle, name: str) -> None:
    module: Module = nn.Conv2d(4, 3, 1) if name == "_conv_forward" else nn.BatchNorm2d(4)
    original, seen = getattr(module, name), []
    setattr(module, name, lambda *args: seen.append(name) or original(*args))
    Around(module)(torch.randn(2, 4, 3, 3))
    assert seen == [name]


def test_a_patch_by_wrapt_is_called(bf16: autoamp.Handle) -> None:
    seen = []

    def wrapper(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        seen.append(wrapped.__name__)
        return wrapped(*args, **kwargs)

    held = {name: getattr(F, name) for name in ("linear", "conv2d")}
    try:
        for name in held:
            wrapt.wrap_function_wrapper("torch.nn.functional", name, wrapper)
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.Linear(3, 3))(torch.randn(2, 4, 3, 3))
    finally:
        for name, function in held.items():
            setattr(F, name, function)
    assert seen == ["conv2d", "linear"]


def test_a_function_without_a_hash(bf16: autoamp.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    class Linear:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

        def __call__(self, x: Tensor, weight: Tensor, bias: Tensor) -> str:
            return "called"

    monkeypatch.setattr(F, "linear", Linear())
    assert Around(nn.Linear(4, 3))(torch.randn(2, 4)) == "called"


def test_tables_of_hooks_that_somebody_rebinds(bf16: autoamp.Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.modules.module, "_global_forward_hooks", OrderedDict())
    module, x, seen = nn.Linear(4, 3), torch.randn(2, 4), []
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__)):
        Around(module)(x)
    assert seen == ["Linear", "Around"]


@pytest.mark.parametrize("training", [1, 0, None])
def test_training_that_is_no_bool(bf16: autoamp.Handle, training: Any) -> None:
    module, x = nn.BatchNorm2d(4), torch.randn(2, 4, 3, 3)
    module.training = training
    expected = copy.deepcopy(module).forward(x)
    assert torch.equal(Around(module)(x), expected)


@pytest.mark.parametrize(
    ("name", "attribute"),
    [("batch norm 2d", "eps"), ("layer norm", "eps"), ("conv2d", "padding_mode"), ("conv2d", "groups")],
)
def test_attributes_of_the_class(
    bf16: autoamp.Handle, name: str, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = CASES[name]
    module, x = make(), torch.randn(shape)
    value = vars(module).pop(attribute)
    with pytest.raises(AttributeError, match=attribute):
        Around(module)(x)
    monkeypatch.setattr(type(module), attribute, value, raising=False)
    assert forwards(module, x) == 1


def test_a_class_with_a_property_for_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Around(nn.Linear(4, 3, bias=False))
    monkeypatch.setattr(nn.Linear, "weight", property(lambda self: torch.ones(3, 4)), raising=False)
    with autoamp.region(device_type="cpu", dtype=HALF):
        assert torch.equal(model(torch.ones(2, 4)).float(), torch.full((2, 3), 4.0))


ATTRIBUTES = [
    ("linear", nn.Linear, "weight"),
    ("linear", nn.Linear, "bias"),
    ("conv2d", nn.modules.conv._ConvNd, "weight"),
    ("layer norm", Module, "weight"),
    ("batch norm 2d", nn.BatchNorm2d, "running_mean"),
    ("batch norm 2d", nn.modules.batchnorm._NormBase, "momentum"),
    ("layer norm", nn.LayerNorm, "eps"),
]


@pytest.mark.parametrize(("name", "owner", "attribute"), ATTRIBUTES)
def test_properties_that_come_and_go(
    handle: autoamp.Handle, name: str, owner: Any, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = CASES[name]
    module, x, seen = make(), torch.randn(shape), []

    def value(self: Any) -> Any:
        seen.append(attribute)
        return vars(self)[attribute] if attribute in vars(self) else Module.__getattr__(self, attribute)

    assert forwards(module, x) == 0
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, property(value), raising=False)
        assert forwards(module, x) == 1
        assert seen
    assert forwards(module, x) == 0


@pytest.mark.parametrize("owner", [Module, nn.Linear])
def test_access_to_attributes_that_somebody_watches(
    handle: autoamp.Handle, owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x, seen = nn.Linear(6, 5), torch.randn(3, 6), set()

    def getattribute(self: Any, name: str) -> Any:
        seen.add(name)
        return object.__getattribute__(self, name)

    assert forwards(module, x) == 0
    with monkeypatch.context() as patch:
        patch.setattr(owner, "__getattribute__", getattribute, raising=False)
        assert forwards(module, x) == 1
        assert "weight" in seen
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "__getattr__", lambda self, name: Module.__getattr__(self, name), raising=False)
        assert forwards(module, x) == 1
    assert forwards(module, x) == 0


@pytest.mark.parametrize("name", ["linear", "conv2d", "layer norm", "batch norm 2d"])
def test_a_namespace_of_functions_that_somebody_replaced(
    handle: autoamp.Handle, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = CASES[name]
    module, x, seen = make(), torch.randn(shape), []

    class Functions:
        def __getattr__(self, attribute: str) -> Any:
            seen.append(attribute)
            return getattr(F, attribute)

    home = sys.modules[type(module).__module__]
    assert forwards(module, x) == 0
    with monkeypatch.context() as patch:
        patch.setattr(home, "F", Functions())
        assert forwards(module, x) == 1
        assert seen
    assert forwards(module, x) == 0


@pytest.mark.parametrize(
    ("name", "function"),
    [("linear", "linear"), ("conv2d", "conv2d"), ("layer norm", "layer_norm"), ("batch norm 2d", "batch_norm")],
)
def test_functions_that_somebody_replaced_are_called(
    bf16: autoamp.Handle, name: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = CASES[name]
    module, x = make(), torch.randn(shape)
    original, seen = getattr(F, function), []

    def replaced(*args: Any, **kwargs: Any) -> Any:
        seen.append(function)
        return original(*args, **kwargs)

    monkeypatch.setattr(F, function, replaced)
    Around(module)(x)
    assert seen == [function]


@pytest.mark.parametrize("name", ["linear", "conv2d", "layer norm", "batch norm 2d"])
def test_a_mode_sees_what_it_always_sees(bf16: autoamp.Handle, name: str) -> None:
    class Looks(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ != "__get__":  # Of a dtype, say: how often we look is no matter.
                self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    make, shape = CASES[name]
    module, x = make(), torch.randn(shape)
    by_forward = copy.deepcopy(module)
    _own_forward(by_forward)
    seen = []
    for one in (module, by_forward):
        with Looks() as looks:
            Around(one)(x)
        seen.append(looks.seen)
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.BatchNorm2d(4), (2, 4, 3)),
        (nn.BatchNorm2d(4), (1, 4, 1, 1)),
        (nn.BatchNorm1d(4), (1, 4)),
        (nn.BatchNorm2d(4, eps=0.0), (2, 4, 3, 3)),
        (nn.BatchNorm2d(4), (2, 5, 3, 3)),
        (nn.Linear(4, 3), (2, 5)),
        (nn.Conv2d(4, 3, 3), (2, 4, 2, 2)),
        (nn.Conv2d(4, 3, 3), (2, 5, 4, 4)),
        (nn.LayerNorm(4), (2, 5)),
    ],
    ids=str,
)
def test_errors_are_those_of_forward(bf16: autoamp.Handle, module: Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with pytest.raises((ValueError, RuntimeError)) as expected:
        module.forward(x)
    buffers = copy.deepcopy(dict(module.named_buffers()))
    with pytest.raises(expected.type) as found:
        Around(module)(x)
    assert str(found.value) == str(expected.value)
    for name, buffer in module.named_buffers():
        # Torch itself counts a batch before it looks at it.
        assert name == "num_batches_tracked" or torch.equal(buffer, buffers[name])


def test_other_batch_norms_go_through_forward(bf16: autoamp.Handle) -> None:
    x = torch.randn(2, 4, 3, 3)
    for settings in ({"momentum": None}, {"track_running_stats": False}):
        assert forwards(nn.BatchNorm2d(4, **settings), x) == 1  # type: ignore[arg-type]
    module = nn.BatchNorm2d(4)
    module.num_batches_tracked = None  # type: ignore[assignment]
    assert forwards(module, x) == 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_batches_are_counted_when_the_norm_runs(bf16: autoamp.Handle, device: str) -> None:
    """Code within the outermost call may read and write a counter, so it is not left for the end of that call."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(4, device=device)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            seen.append(self.counter())
            x = self.norm(x)
            seen.append(self.counter())
            self.norm.reset_running_stats()
            return x

        def counter(self) -> tuple[int, int | None]:
            # Without values, on another device, a tensor still tells how often it was written to.
            counter = self.norm.get_buffer("num_batches_tracked")
            return counter._version - before, None if counter.is_meta else int(counter)

    seen: list[tuple[int, int | None]] = []
    model, x = Counts(), torch.randn(2, 4, 3, 3, device=device)
    assert forwards(model.norm, x) == 0
    model.norm.reset_running_stats()
    before = model.norm.get_buffer("num_batches_tracked")._version
    model(x)
    assert [version for version, _ in seen] == [1, 2]
    if device == "cpu":
        assert [value for _, value in seen] == [1, 2]
        assert model.counter() == (3, 0)


def test_convolutions_that_pad_otherwise(bf16: autoamp.Handle) -> None:
    module, x = nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"), torch.randn(2, 4, 5, 5)
    assert forwards(module, x) == 1


def test_hooks_for_all_modules(bf16: autoamp.Handle) -> None:
    module, x, seen = nn.Linear(4, 3), torch.randn(2, 4), []
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__)):
        Around(module)(x)
    assert seen == ["Linear", "Around"]
    assert forwards(module, x) == 0


def test_weights_that_are_put_in_for_one_call(bf16: autoamp.Handle) -> None:
    model, x = Around(nn.Linear(4, 3)), torch.randn(2, 4)
    values = {name: torch.randn_like(value) for name, value in model.named_parameters()}
    found = torch.func.functional_call(model, values, (x,))
    expected = F.linear(x, values["inner.weight"], values["inner.bias"])
    assert torch.equal(found, expected)
    assert not torch.equal(model(x), expected)


def test_parametrized_layers(bf16: autoamp.Handle) -> None:
    module = parametrizations.weight_norm(nn.Linear(4, 3))
    x = torch.randn(2, 4)
    before = Around(module)(x)
    with torch.no_grad():
        module.parametrizations.weight.original0.mul_(2.0)  # type: ignore[union-attr]
    torch.testing.assert_close(
        Around(module)(x) - module.bias, (before - module.bias) * 2.0, rtol=2e-2, atol=2e-2
    )  # fmt: skip


def test_a_module_that_did_not_call_init(bf16: autoamp.Handle) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            pass

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(AttributeError, match=r"_backward_hooks|__init__"):
        Around.__call__(_with(Around(nn.Identity()), Bare()), torch.ones(1))


def _with(outer: Around, inner: Module) -> Around:
    vars(outer)["inner"] = inner
    return outer


def test_errors_of_forward_are_not_mistaken(bf16: autoamp.Handle) -> None:
    class Fails(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            raise KeyError("_forward_hooks")

    with pytest.raises(KeyError):
        Around(Fails())(torch.ones(1))
    assert Fails.calls == 1


def test_a_compiled_implementation_is_called(bf16: autoamp.Handle) -> None:
    module, x, seen = nn.Linear(4, 3), torch.randn(2, 4), []

    def compiled(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return x

    module._compiled_call_impl = compiled
    assert Around(module)(x) is x
    assert len(seen) == 1


def test_a_class_with_an_implementation_of_its_own(bf16: autoamp.Handle) -> None:
    class Counted(nn.Linear):
        calls = 0

        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            return super()._call_impl(*args, **kwargs)  # type: ignore[misc]

    Around(Counted(4, 3))(torch.randn(2, 4))
    assert Counted.calls == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traces_hold_the_modules(bf16: autoamp.Handle) -> None:
    model, x = Around(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))), torch.randn(2, 4)
    traced = torch.jit.trace(model, x)
    assert "Linear" in str(traced.inner)
    assert "LayerNorm" in str(traced.inner)
    assert torch.equal(traced(x), model(x))


def test_symbolic_traces_of_layers_that_are_no_leaves(bf16: autoamp.Handle) -> None:
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
            return False

    with autoamp.disable_casts():
        graph = Tracer().trace(nn.Sequential(nn.Linear(4, 3)))
    assert [node.target for node in graph.nodes if node.op == "get_attr"] == ["0.weight", "0.bias"]


def test_models_pickle_and_copy_as_ever(bf16: autoamp.Handle) -> None:
    model, x = Around(nn.Linear(4, 3)), torch.randn(2, 4)
    expected = model(x)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)


def test_lists_hold_in_shortcuts() -> None:
    with autoamp.region(device_type="cpu", dtype=HALF, lists={"extends": [], "fp16": ["linear"], "fp32": ["conv2d"]}):
        assert Around(nn.Linear(4, 3))(torch.randn(2, 4)).dtype is HALF
        assert Around(nn.Conv2d(4, 3, 1).to(HALF))(torch.randn(2, 4, 2, 2)).dtype is torch.float32
        with autoamp.disable_casts():
            assert Around(nn.Linear(4, 3))(torch.randn(2, 4)).dtype is torch.float32


def test_calls_are_counted() -> None:
    handle = autoamp.init(device_type="cpu", dtype=HALF)
    model, x = Around(nn.Linear(4, 3)), torch.randn(2, 4)
    model(x)
    with handle.count() as counts:
        model(x)
    model(x)
    assert counts.ops == {"torch.nn.functional.linear": {"bfloat16": 1}}
    handle.deactivate()
