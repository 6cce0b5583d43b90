"""What programs hear that ask torch whether autocast is on, and what becomes of the regions that they open by it."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.core import original_of

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")

# On CPUs torch's own autocast dtype is bf16: an answer of fp16 is ours.
HALF, OWN = torch.float16, torch.bfloat16
ON, OFF = (True, HALF, True, HALF), (False, OWN, False, OWN)


def told() -> tuple[Any, ...]:
    """All that torch tells of autocast on CPUs."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cpu_enabled(),
        torch.get_autocast_cpu_dtype(),
    )


def told_of_others() -> tuple[Any, ...]:
    """All that torch tells of autocast on devices that are not cast."""
    dtypes = torch.get_autocast_dtype("cuda"), torch.get_autocast_gpu_dtype(), torch.get_autocast_xla_dtype()
    return torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda"), torch.is_autocast_xla_enabled(), *dtypes


def own() -> tuple[bool, torch.dtype]:
    """The state that torch has, whatever it tells."""
    return original_of(torch.is_autocast_enabled)("cpu"), original_of(torch.get_autocast_dtype)("cpu")


def off(device_type: str = "cpu") -> torch.autocast:
    return torch.autocast(device_type, enabled=False)


class Asks(nn.Module):
    """Calls a listed op within what it is given, and asks there."""

    def __init__(self, within: Callable[[], Any] = contextlib.nullcontext) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.within = within
        self.heard: list[tuple[Any, ...]] = []
        self.dtypes: list[torch.dtype] = []
        self.is_own_on: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        with self.within():
            self.heard.append(told())
            self.is_own_on.append(original_of(torch.is_autocast_enabled)("cpu"))
            output = F.linear(x, self.weight)
        self.dtypes.append(output.dtype)
        return output


@pytest.fixture(params=["global", "modules"])
def handle(request: pytest.FixtureRequest) -> autoamp.Handle:
    return autoamp.init(device_type="cpu", dtype=HALF, scope=request.param)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, requires_grad=True)


def call(how: str, handle: autoamp.Handle, model: nn.Module, x: Tensor) -> None:
    """Call a module in one of the ways of `EAGER`."""
    around: dict[str, Any] = {
        "override": lambda: handle.override(model, "fp32"),
        "disable_casts": handle.disable_casts,
        "region off": off,
        "torch.autocast": lambda: torch.autocast("cpu", OWN),
    }
    if how.startswith("checkpoint"):
        outer = nn.Identity()
        outer.forward = lambda x: checkpoint(model, x, use_reentrant=how.endswith("reentrant"))  # type: ignore[method-assign]
        outer(x).float().sum().backward()
    elif how == "thread":
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
    else:
        with around.get(how, contextlib.nullcontext)():
            model(x)


EAGER = {
    "plain": ON[:2],
    "override": OFF[:2],
    "disable_casts": OFF[:2],
    # Like any region, a disabled one has the dtype that was in use where it was made.
    "region off": (False, None),
    "checkpoint": ON[:2],
    "checkpoint, reentrant": ON[:2],
    "thread": ON[:2],
    "torch.autocast": (True, OWN),
}


def expected_of(how: str, handle: autoamp.Handle) -> tuple[bool, Any]:
    """Return what a module is told. With ``scope="modules"`` a disabled region around it is a switch."""
    return EAGER["plain" if how == "region off" and handle.settings.scope == "modules" else how]


@pytest.mark.parametrize("how", EAGER)
def test_what_a_module_is_told(handle: autoamp.Handle, x: Tensor, how: str) -> None:
    model, (is_on, dtype), others = Asks(), expected_of(how, handle), told_of_others()
    call(how, handle, model, x)
    assert len(model.heard) == 1 + how.startswith("checkpoint")
    for heard in model.heard:
        assert heard[:2] == heard[2:]
        assert heard[0] is is_on
        assert dtype in (None, heard[1])
    assert set(model.dtypes) == {dtype if is_on else torch.float32}
    assert set(model.is_own_on) == {how == "torch.autocast"}
    assert others == told_of_others()
    assert own() == OFF[:2]


@pytest.mark.parametrize(("scope", "expected"), [("global", ON), ("modules", OFF)])
def test_what_is_told_outside_of_modules(scope: str, expected: Any) -> None:
    handle = autoamp.init(device_type="cpu", dtype=HALF, scope=scope)
    assert told() == expected
    with autoamp.region():
        assert told() == ON
    heard: list[Any] = []
    thread = threading.Thread(target=lambda: heard.append(told()))
    thread.start()
    thread.join()
    assert heard == [expected]
    handle.deactivate()
    assert told() == OFF


def test_half_models_are_no_autocast() -> None:
    """Under O2 a program hears what it hears of a model that it made half itself."""
    model = Asks()
    amp_model, _ = autoamp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", verbosity=0)
    amp_model(torch.randn(2, 3))
    assert model.heard == [OFF]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_compiled_code_is_told(handle: autoamp.Handle, x: Tensor, backend: str) -> None:
    """The answers are constants of a graph, which is not taken where they differ."""
    model = Asks()
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    ways = ["plain", "override", "disable_casts", "region off", "plain", "torch.autocast"]
    for how in ways:
        call(how, handle, compiled, x)
    expected = [expected_of(how, handle) for how in ways]
    answers = [heard[: 1 + (dtype is not None)] for heard, (_, dtype) in zip(model.heard, expected, strict=True)]
    assert answers == [(is_on, *((dtype,) if dtype is not None else ())) for is_on, dtype in expected]
    model = Asks(off)
    torch.compile(model, backend=backend, fullgraph=True)(x)
    assert (model.heard[0][0], model.dtypes) == (False, [torch.float32])
    assert own() == OFF[:2]
    torch._dynamo.reset()


# -- who asks --


def test_the_dtype_of_attention_is_chosen_as_under_autocast(handle: autoamp.Handle) -> None:
    """A norm left the query in fp32, which flash attention refuses: transformers casts it as autocast would."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            query, value = self.norm(self.project(x)).float(), self.project(x)
            if query.dtype is torch.float32 and torch.is_autocast_enabled(query.device.type):
                query = query.to(torch.get_autocast_dtype(query.device.type))
            assert query.dtype is value.dtype is HALF
            return query * value

    Attention()(torch.randn(2, 8))


def asked_by(module: str) -> tuple[Any, ...]:
    """What the code of a module is told."""
    names: dict[str, Any] = {"__name__": module, "torch": torch}
    exec(f"def told():\n    return {', '.join(f'torch.{name}' for name in ASKED)}", names)
    answer: tuple[Any, ...] = names["told"]()
    return answer


ASKED = (
    "is_autocast_enabled('cpu')", "get_autocast_dtype('cpu')", "is_autocast_cpu_enabled()", "get_autocast_cpu_dtype()",
)  # fmt: skip


@pytest.mark.parametrize(
    ("module", "expected"),
    [("a_program", ON), ("torchvision.ops.roi_align", ON), ("__main__", ON), ("torch.utils.checkpoint", OFF),
     ("torch.nn.parallel.parallel_apply", OFF), ("torch.amp.autocast_mode", OFF), ("torch", OFF),
     ("autoamp.normalization", OFF)],
)  # fmt: skip
def test_torch_hears_of_its_own_state_alone(module: str, expected: Any) -> None:
    """It puts that state back later: after a region, in a recomputation, in a thread."""
    autoamp.init(device_type="cpu", dtype=HALF)
    assert asked_by(module) == expected


def test_functions_that_a_program_has_taken_by_name_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    program = types.ModuleType("a_program")
    program.is_autocast_enabled = torch.is_autocast_enabled  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_program", program)
    autoamp.init(device_type="cpu", dtype=HALF)
    assert program.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("handle")
def test_torchs_own_layers_compute_as_before(x: Tensor) -> None:
    """Attention and encoder layers look for autocast, and take another path where it is on."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    x = torch.randn(1, 4, 8)
    with torch.inference_mode():
        assert layer(x).isfinite().all()
    assert own() == OFF[:2]


# -- regions --


@pytest.mark.parametrize("within", [lambda: torch.autocast("cpu", HALF), lambda: torch.autocast("cpu")])
@pytest.mark.parametrize("how", ["plain", "checkpoint", "checkpoint, reentrant", "thread"])
def test_our_casts_go_on_in_an_enabled_region(handle: autoamp.Handle, x: Tensor, how: str, within: Any) -> None:
    @contextlib.contextmanager
    def region() -> Any:
        with within():
            with off():
                assert F.linear(x, model.weight).dtype is torch.float32
            yield

    model = Asks(region)
    call(how, handle, model, x)
    assert set(model.heard) == {ON}
    assert set(model.dtypes) == {HALF}
    assert not any(model.is_own_on)
    assert own() == OFF[:2]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_region_in_compiled_code_takes_the_dtype_in_use(handle: autoamp.Handle, x: Tensor, backend: str) -> None:
    """Torch casts within it. It is no sign that the program casts by itself."""
    scaling = handle.auto_scale()
    model = Asks(lambda: torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu")))
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        compiled(x).float().sum().backward()
    assert (model.heard[0], model.dtypes[0], scaling.yielded_to) == (ON, HALF, None)
    assert own() == OFF[:2]
    torch._dynamo.reset()


@pytest.mark.parametrize("ask", [lambda: torch.is_autocast_enabled("cpu"), lambda: torch.is_autocast_cpu_enabled()])
def test_a_region_that_a_program_opens_by_the_answer_changes_nothing(x: Tensor, ask: Any) -> None:
    """Neither inside of modules nor outside does a program with it cast by itself."""
    scaling = autoamp.init(device_type="cpu", dtype=HALF, scope="modules").auto_scale()
    model = Asks(lambda: torch.autocast("cpu", enabled=ask()))
    with torch.autocast("cpu", enabled=ask(), dtype=torch.get_autocast_dtype("cpu")):
        Asks()(x)
    for _ in range(2):
        model(x).sum().backward()
    assert set(model.dtypes) == {HALF}
    assert scaling.yielded_to is None


def test_regions_of_another_dtype_or_around_a_model_are_torchs(x: Tensor) -> None:
    autoamp.init(device_type="cpu", dtype=HALF)
    for region in (lambda: torch.autocast("cpu", OWN), contextlib.nullcontext):
        model = Asks(region)
        with torch.autocast("cpu", OWN):
            model(x)
        assert model.dtypes == [OWN]
    with torch.autocast("cpu", HALF):
        assert own() == (True, HALF)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_disabled_region_of_another_device_protects_what_a_module_does_there(
    handle: autoamp.Handle, x: Tensor, compiled: bool
) -> None:
    model = Asks(lambda: off("cuda"))
    model.forward = torch.autocast("cuda", enabled=False)(model.forward)  # type: ignore[method-assign]
    called: Any = torch.compile(model, backend="eager") if compiled else model
    assert called(x).dtype is torch.float32
    assert set(model.dtypes) == {torch.float32}
    after = Asks()
    after(x)
    assert after.dtypes == [HALF]
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["checkpoint", "checkpoint, reentrant"])
def test_that_holds_where_a_checkpoint_recomputes(handle: autoamp.Handle, x: Tensor, how: str) -> None:
    model, weight = nn.Identity(), torch.randn(3, 3)
    dtypes: list[torch.dtype] = []

    def rotate(x: Tensor) -> Tensor:
        with off("cuda"):
            output = F.linear(x, weight)
        dtypes.append(output.dtype)
        return output.exp()

    model.forward = lambda x: checkpoint(rotate, x, use_reentrant=how.endswith("reentrant"))  # type: ignore[method-assign]
    model(x).sum().backward()
    assert dtypes == [torch.float32] * 2


# -- setters --


def save_and_set(is_on: bool, old: bool) -> Callable[[], None]:
    """Set the state as a program does that knows no region, and return what puts it back."""
    if old:
        before = torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()
        torch.set_autocast_cpu_enabled(is_on)
        return lambda: (torch.set_autocast_cpu_enabled(before[0]), torch.set_autocast_cpu_dtype(before[1]))  # type: ignore[return-value]
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cpu", is_on)
    return lambda: (torch.set_autocast_enabled("cpu", before[0]), torch.set_autocast_dtype("cpu", before[1]))  # type: ignore[return-value]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("how", ["plain", "checkpoint", "checkpoint, reentrant", "thread", "compiled"])
@pytest.mark.parametrize("is_on", [False, True])
def test_setters_set_what_getters_told(handle: autoamp.Handle, x: Tensor, how: str, old: bool, is_on: bool) -> None:
    @contextlib.contextmanager
    def by_setters() -> Any:
        restore = save_and_set(is_on, old)
        try:
            assert told()[0] is is_on
            yield
        finally:
            restore()
        assert told() == ON

    model = Asks(by_setters)
    called: Any = torch.compile(model, backend="eager") if how == "compiled" else model
    for _ in range(2):
        call(how, handle, called, x)
    assert {heard[0] for heard in model.heard} == {is_on}
    assert set(model.dtypes) == {HALF if is_on else torch.float32}
    assert own() == OFF[:2]
    torch._dynamo.reset()


def test_what_a_module_leaves_set_ends_with_its_call(x: Tensor) -> None:
    autoamp.init(device_type="cpu", dtype=HALF, scope="modules")
    leaves_off, later = Asks(lambda: contextlib.nullcontext(torch.set_autocast_enabled("cpu", False))), Asks()
    nn.Sequential(leaves_off, later)(x)
    later(x)
    assert (leaves_off.dtypes, later.dtypes) == ([torch.float32], [torch.float32, HALF])


def test_within_disabled_casts_setters_are_torchs(handle: autoamp.Handle) -> None:
    with handle.disable_casts():
        torch.set_autocast_enabled("cpu", True)
        assert own()[0]
        torch.set_autocast_enabled("cpu", False)
        assert not told()[0]


def test_other_devices_and_dtypes_are_set_in_torch(x: Tensor) -> None:
    autoamp.init(device_type="cpu", dtype=HALF)
    torch.set_autocast_dtype("cuda", OWN)
    assert torch.get_autocast_dtype("cuda") is OWN
    torch.set_autocast_gpu_dtype(HALF)
    torch.set_autocast_enabled(True)
    assert torch.is_autocast_enabled()
    torch.set_autocast_enabled("cuda", False)
    assert told_of_others()[:2] == (False, False)
    with pytest.raises(TypeError):
        torch.set_autocast_enabled()  # type: ignore[call-overload]


def test_setters_take_names(x: Tensor) -> None:
    autoamp.init(device_type="cpu", dtype=HALF)
    torch.set_autocast_enabled("cpu", enabled=False)
    assert torch.is_autocast_enabled(device_type="cpu") is False
    assert F.linear(x, x).dtype is torch.float32
    torch.set_autocast_enabled(enabled=True, device_type="cpu")
    torch.set_autocast_dtype("cpu", dtype=HALF)
    assert (told(), own()) == (ON, OFF[:2])
