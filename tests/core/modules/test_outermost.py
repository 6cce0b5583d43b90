"""Which calls of outermost modules open casts, and what a disabled torch.autocast region around or in them means."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune

import autoamp
from tests.core.modules.watches import Calls, Watch

HALF, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def handle() -> Iterator[autoamp.Handle]:
    """Return a handle that casts by module, as `autoamp run` makes it."""
    made = autoamp.init(dtype=HALF, device_type="cpu", scope="modules")
    assert isinstance(made, autoamp.Handle)
    yield made
    made.deactivate()


def products(x: Any) -> torch.dtype:
    """Return the dtype in which a listed op computes here."""
    return F.linear(torch.ones(4, 4), torch.ones(4, 4)).dtype


class Own(nn.Module):
    """A module that computes by an op of its own, beside what it contains."""

    def __init__(self, *inner: nn.Module, **others: Tensor) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)
        for name, value in others.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(products(x))
        for module in self.inner:
            x = module(x)
        return x


class Builds(Own):
    """A module that makes its parameters at its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.inner:
            self.inner.append(nn.Linear(4, 4))
        return super().forward(x)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def pruned() -> nn.Module:
    layer = nn.Linear(4, 4)
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


# The module whose op is looked at, and whether an outermost call of it casts.
OWN: dict[str, tuple[Callable[[], Own], bool]] = {
    "layers": (lambda: Own(nn.Linear(4, 4)), True),
    "layers far below": (lambda: Own(nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(4, 4)))), True),
    "a parameter alone": (lambda: Own(weight=nn.Parameter(torch.ones(2))), True),
    "frozen layers": (lambda: Own(frozen(nn.Linear(4, 4))), True),
    "a lazy layer": (lambda: Own(nn.LazyLinear(4)), True),
    "parametrized": (lambda: Own(parametrizations.weight_norm(nn.Linear(4, 4))), True),
    "pruned": (lambda: Own(pruned()), True),
    "an integer parameter": (lambda: Own(weight=nn.Parameter(torch.ones(2, dtype=torch.int32), False)), True),
    "nothing": (Own, False),
    "buffers alone": (lambda: Own(table=torch.ones(4, 4)), False),
    "modules without parameters": (lambda: Own(nn.ReLU(), nn.Sequential(nn.Dropout())), False),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_call_opens_casts_where_the_module_has_parameters(handle: autoamp.Handle, kind: str) -> None:
    build, is_cast = OWN[kind]
    module, x = build(), torch.ones(2, 4)
    for _ in range(2):
        assert module(x).dtype is FP32
    with torch.no_grad():
        module(x)
    assert module.seen == [HALF if is_cast else FP32] * 3


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "Sequential": nn.Sequential,
    "DataParallel": nn.DataParallel,
    "compiled": lambda module: torch.compile(module, backend="eager"),  # type: ignore[dict-item, return-value]
    "a replica": lambda module: module._replicate_for_data_parallel(),
    "averaged": torch.optim.swa_utils.AveragedModel,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("has_parameters", [True, False])
def test_wrappers_are_as_what_they_wrap(handle: autoamp.Handle, wrapper: str, has_parameters: bool) -> None:
    seen: list[torch.dtype] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if has_parameters:
                self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, torch.ones(4, 4)).exp() * 0 + F.linear(x, torch.ones(4, 4)).element_size()

    model = WRAPPERS[wrapper](Model())
    for _ in range(2):
        sizes = model(torch.ones(2, 4))
        assert sizes.dtype is FP32
        seen += [{2.0: HALF, 4.0: FP32}[float(sizes[0, 0])]]
    # A replica has plain tensors in place of its parameters, and nothing that tells whether there were any.
    assert seen == [HALF if has_parameters or wrapper == "a replica" else FP32] * 2


def test_distributed_data_parallel_is_as_what_it_wraps(handle: autoamp.Handle) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Own(nn.Linear(4, 4))
        DistributedDataParallel(model)(torch.ones(2, 4)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert model.seen == [HALF]


def test_a_module_that_makes_its_parameters_when_it_is_called_is_cast_from_the_next_call_on(
    handle: autoamp.Handle,
) -> None:
    model, x = Builds(), torch.ones(2, 4)
    with handle.count() as counts:
        model(x)
    # The layer within is the first module that has parameters.
    assert counts.by_dtype() == {"bfloat16": 1}
    model(x)
    assert model.seen == [FP32, HALF]


def test_the_first_module_below_that_has_parameters_opens_casts(handle: autoamp.Handle) -> None:
    layers, loss = [Watch(), Watch()], nn.MSELoss()
    found: list[Any] = []

    def perceptual(x: Tensor) -> Tensor:
        """A loss as a module, which holds a network that is not registered."""
        y = layers[1](layers[0](x))
        found.extend([products(x), y.dtype])
        return loss(y, x)

    out = Calls(perceptual)(torch.ones(2, 4))
    assert [layer.seen[1] for layer in layers] == [HALF, HALF]
    assert found == [FP32, FP32]
    assert out.dtype is FP32


@pytest.mark.parametrize("precision", ["fp16", "fp32", "none"])
def test_a_precision_of_its_own_holds_for_a_module_without_parameters(handle: autoamp.Handle, precision: str) -> None:
    module = Own()
    with handle.override(module, precision):
        module(torch.ones(2, 4))
    assert module.seen == [HALF if precision == "fp16" else FP32]


def test_paths_of_a_list_begin_at_the_first_module_that_has_parameters() -> None:
    handle = autoamp.init(dtype=HALF, device_type="cpu", scope="modules", lists={"modules": {"0": "fp32"}})
    model = nn.Sequential(Watch(), Watch())
    held = [model]
    Calls(lambda x: held[0](x))(torch.ones(2, 4))
    assert [watch.seen[1] for watch in model] == [FP32, HALF]  # type: ignore[index, union-attr]
    handle.deactivate()


def test_modules_that_lose_their_parameters_are_exact(handle: autoamp.Handle) -> None:
    layer, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    with handle.disable_casts():
        expected = layer(x)
        frozen_script = torch.jit.freeze(torch.jit.script(layer))
    torch.testing.assert_close(frozen_script(x), expected)


# -- disabled regions --


def off() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


class Model(Own):
    """A model that computes in a region that it opens around some of its own ops."""

    def __init__(self, region: Callable[[], Any] = contextlib.nullcontext) -> None:
        super().__init__(nn.Linear(4, 4))
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        with self.region():
            return super().forward(x.float())


def test_a_disabled_region_outside_of_modules_is_a_switch(handle: autoamp.Handle) -> None:
    model, table = Model(), torch.ones(4, 4)
    with off(), off():
        assert model(torch.ones(2, 4)).dtype is FP32
        # As without the region: what is no module's is not cast.
        assert (table @ table).dtype is FP32
        assert F.softmax(table.to(HALF), -1).dtype is FP32
        with handle.disable_casts():
            model(torch.ones(2, 4))
    assert off()(model)(torch.ones(2, 4)).dtype is FP32
    assert model.seen == [HALF, FP32, HALF]
    assert handle.loss_scale is not None


def test_a_disabled_region_in_a_modules_call_is_fp32(handle: autoamp.Handle) -> None:
    inner, outer = Model(off), Own(nn.Linear(4, 4))
    outer.inner.append(inner)
    with off():
        outer(torch.ones(2, 4))
    Calls(lambda x: inner(x))(torch.ones(2, 4))
    assert outer.seen == [HALF]
    assert inner.seen == [FP32, FP32]


def test_a_disabled_region_in_the_call_of_a_module_without_parameters_is_fp32(handle: autoamp.Handle) -> None:
    model = Model()

    def in_region(x: Tensor) -> Tensor:
        Calls(lambda x: x)(x)
        with off():
            return Calls(lambda x: model(x))(x)

    Calls(in_region)(torch.ones(2, 4))
    with pytest.raises(ZeroDivisionError):
        Calls(lambda x: 1 / 0)(None)
    with off():
        model(torch.ones(2, 4))
    assert model.seen == [FP32, HALF]


def test_a_program_that_opens_an_enabled_region_means_its_disabled_ones(handle: autoamp.Handle) -> None:
    model = Model()
    with torch.no_grad(), torch.autocast("cpu", dtype=HALF):
        model(torch.ones(2, 4))
    with off():
        model(torch.ones(2, 4))
    model(torch.ones(2, 4))
    # And the program casts by itself from the first one on in which it trains.
    with torch.autocast("cpu", dtype=HALF):
        model(torch.ones(2, 4))
    with off():
        model(torch.ones(2, 4))
    model(torch.ones(2, 4))
    assert model.seen == [HALF, FP32, HALF, HALF, FP32, FP32]


def test_a_switch_that_is_on_from_some_step_on(handle: autoamp.Handle) -> None:
    model = Model()
    for enabled in (False, True, False):
        with torch.autocast("cpu", dtype=HALF, enabled=enabled):
            model(torch.ones(2, 4))
    assert model.seen == [HALF, HALF, FP32]


def test_threads_have_their_own_switches(handle: autoamp.Handle) -> None:
    model, other = Model(), Model()

    def in_thread(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: off()(other)(x))
        thread.start()
        thread.join()
        return x

    Calls(lambda x: in_thread(x))(torch.ones(2, 4))
    off()(model)(torch.ones(2, 4))
    assert (model.seen, other.seen) == ([HALF], [HALF])


def test_compiled_code_takes_a_disabled_region_as_eager_code_does(handle: autoamp.Handle) -> None:
    plain, exact = nn.Linear(4, 4), nn.Linear(4, 4)

    class WithRegion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.exact = plain, exact

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with off():
                y = self.exact(x.float())
            return self.plain(x), y

    model, x = WithRegion(), torch.randn(4, 4)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        with off():
            return model(x)

    with torch.no_grad():
        expected = step(x)
        torch.testing.assert_close(expected[1], F.linear(x, exact.weight, exact.bias), rtol=0.0, atol=0.0)
        assert not torch.equal(expected[0], F.linear(x, plain.weight, plain.bias))
        found = torch.compile(step, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_in_the_global_scope_a_disabled_region_is_fp32_wherever_it_is_opened() -> None:
    handle = autoamp.init(dtype=HALF, device_type="cpu")
    model, bare = Model(), Own()
    with off():
        model(torch.ones(2, 4))
    bare(torch.ones(2, 4))
    assert (model.seen, bare.seen) == ([FP32], [HALF])
    handle.deactivate()


# -- what a program reads outside of models, and outputs --


class Adapter(nn.Module):
    """A parametrization with parameters, as LoRA's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def test_parametrized_weights_are_read_and_merged_in_fp32(handle: autoamp.Handle) -> None:
    adapter, layer = Adapter(), nn.Linear(8, 8)
    exact = layer.weight.detach().double() + (adapter.a.double() @ adapter.b.double()).detach()
    parametrize.register_parametrization(layer, "weight", adapter)
    with handle.count() as counts:
        torch.testing.assert_close(layer.weight.double(), exact, rtol=0.0, atol=1e-5)
        assert not counts.casts
        assert nn.Sequential(layer)(torch.randn(2, 8)).dtype is FP32
        assert counts.casts
    parametrize.remove_parametrizations(layer, "weight")
    torch.testing.assert_close(layer.weight.double(), exact, rtol=0.0, atol=1e-5)


def test_orthogonal_weights_are_orthogonal_in_fp32(handle: autoamp.Handle) -> None:
    layer = parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="matrix_exp")
    torch.testing.assert_close(layer.weight @ layer.weight.T, torch.eye(8), rtol=0.0, atol=1e-5)


class Spectrum(nn.Module):
    """Returns complex numbers made of half reals, and reals."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"complex": torch.view_as_complex(y.reshape(-1, 2)), "real": y}


@pytest.mark.filterwarnings("ignore:this CPU has no fp16 units:UserWarning")
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_complex_outputs_are_widened_too(half: torch.dtype) -> None:
    made = autoamp.init(dtype=half, device_type="cpu", scope="modules")
    found = Spectrum()(torch.randn(2, 4))
    assert (found["complex"].dtype, found["real"].dtype) == (torch.complex64, FP32)
    found["complex"].abs().sum().backward()
    made.deactivate()
