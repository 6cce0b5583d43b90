"""A module's call: in the precision that its module has, with its hooks, by keyword, in several threads."""

from __future__ import annotations

import copy
import cProfile
import itertools
import pstats
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from tests.core.modules.watches import FP32, HALF, LISTS, Calls, Outer, Watch, watches


def test_fp32_forward_and_backward(handle: autoamp.Handle) -> None:
    model = Outer()
    reference = copy.deepcopy(model)
    x = torch.randn(2, 4)
    with handle.override(model.middle, "fp32"):
        model(x).float().sum().backward()
    assert [watch.seen for watch in watches(model)] == [[FP32, HALF], [FP32, FP32], [FP32, FP32], [FP32, HALF]]
    assert [watch.returned for watch in watches(model)] == [[HALF], [FP32], [FP32], [HALF]]
    reference(x).float().sum().backward()
    assert {watch.seen[1] for watch in watches(reference)} == {HALF}
    for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == FP32
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=2e-2, atol=2e-2)


def test_fp16_gives_half_inputs_and_the_lists_hold_within(handle: autoamp.Handle) -> None:
    model, x = Calls(lambda x: (x.dtype, torch.mm(x, x).dtype, torch.exp(x).dtype)), torch.randn(3, 3)
    assert model(x) == (FP32, HALF, FP32)
    for precision, given, dtypes in (
        ("fp16", x, (HALF, HALF, FP32)),
        ("fp32", x.half(), (FP32, FP32, FP32)),
        ("none", x, (FP32, FP32, FP32)),
        ("none", x.half(), (HALF, HALF, HALF)),
    ):
        with handle.override(model, precision):
            assert model(given) == dtypes
    assert model(x) == (FP32, HALF, FP32)


def test_fp16_inside_fp32_inside_fp16(handle: autoamp.Handle) -> None:
    model = nn.Sequential(Outer())
    outer = model[0]
    with handle.override(model, "fp16"), handle.override(outer, "fp32"), handle.override(outer.middle, "fp16"):
        output = model(torch.randn(2, 4))
        # What the fp16 part returns goes on in fp32, since nothing is cast around it.
        assert [watch.seen for watch in watches(outer)] == [[FP32, FP32], [HALF, HALF], [HALF, HALF], [FP32, FP32]]
        assert output.dtype == FP32
        output.sum().backward()
    assert [watch.returned for watch in watches(outer)] == [[FP32], [HALF], [HALF], [FP32]]


def test_disable_casts_and_autocast_regions_beat_an_override(handle: autoamp.Handle) -> None:
    model = Watch()
    for around, dtype in ((handle.disable_casts(), FP32), (torch.autocast("cpu", torch.bfloat16), torch.bfloat16)):
        with handle.override(model, "fp16"), around:
            model(torch.randn(2, 4))
        assert model.seen[1] == dtype


# -- threads --


def in_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(30)


def test_other_threads_see_the_override_but_not_its_switch(handle: autoamp.Handle) -> None:
    inner, plain, x = Watch(), Watch(), torch.randn(2, 4)

    def forward(x: Tensor) -> Tensor:
        in_thread(lambda: plain(x))
        return inner(x)

    model = Calls(forward)
    with handle.override(model, "fp32"):
        model(x)
        assert plain.seen == [FP32, HALF]
        assert inner.seen == [FP32, FP32]
        in_thread(lambda: model(x))
        assert inner.seen == [FP32, FP32]


def test_a_region_s_override_does_nothing_in_other_threads() -> None:
    model = Watch()
    with autoamp.region(device_type="cpu", dtype=HALF, lists=LISTS) as handle, handle.override(model, "fp16"):
        for run, dtype in ((in_thread, FP32), (lambda function: function(), HALF)):
            run(lambda: model(torch.randn(2, 4)))
            assert model.seen == [dtype, dtype]


# -- the patched call itself --


def test_hooks_and_keywords_are_those_of_the_module(handle: autoamp.Handle) -> None:
    model = nn.Linear(4, 4)
    order = []
    model.register_forward_pre_hook(lambda *_: order.append("before"))
    model.register_forward_hook(lambda *_: order.append("after"))
    with handle.override(model, "fp32"):
        assert model(input=torch.randn(2, 4).half()).dtype == FP32
    assert order == ["before", "after"]
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"


def test_a_module_that_calls_itself(handle: autoamp.Handle) -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, depth: int) -> Tensor:
            return self(self.layer(x), depth - 1) if depth else x

    model = Recursive()
    assert model(torch.randn(2, 4), 3).dtype == HALF
    with handle.override(model, "fp32"):
        assert model(torch.randn(2, 4), 3).dtype == FP32
    assert len(handle.cache) == 0


# -- what stack traces and profiles show --


OURS = str(Path(autoamp.__file__).parent)


class Fails(nn.Module):
    """Calls a function of a patched layer's output that fails."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


FAILURES: dict[str, Callable[[Tensor], Any]] = {
    "the layer": lambda x: {}["absent"],
    "an op": lambda x: F.linear(x, torch.ones(3, 3)),
    "a loss": lambda x: F.cross_entropy(x, torch.arange(7)),
    "a promoted op": lambda x: torch.cat([x, torch.ones(1)]),
}


def frames_of(model: nn.Module) -> list[tuple[bool, str]]:
    """Call a model that fails; return the frames on the way: whether they are of autoamp, and their functions."""
    try:
        model(torch.ones(2, 4))
    except (KeyError, RuntimeError, ValueError) as error:
        return [(frame.filename.startswith(OURS), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    pytest.fail("nothing was raised")


@pytest.mark.parametrize("scope", ["global", "modules", "override", "O2", "counted"])
@pytest.mark.parametrize("name", FAILURES)
def test_stack_traces_have_torchs_frames_and_two_of_ours_a_patched_call(name: str, scope: str) -> None:
    model = nn.Sequential(nn.Sequential(Fails(FAILURES[name])))
    plain = frames_of(model)
    if scope == "O2":
        autoamp.initialize(model, opt_level="O2", device_type="cpu", dtype=HALF, verbosity=0)
    else:
        handle = autoamp.init(device_type="cpu", dtype=HALF, scope="modules" if scope == "modules" else "global")
        if scope == "override":
            handle.override(model[0][0], "fp16")
        if scope == "counted":
            # As under `autoamp run`, which counts casts.
            handle.count().__enter__()
    try:
        found = frames_of(model)
    finally:
        autoamp.current_handle().deactivate()
    assert [frame for frame in found if not frame[0]] == plain
    assert any(ours for ours, _ in found)
    assert max(len(list(group)) for ours, group in itertools.groupby(found, lambda frame: frame[0]) if ours) <= 2


def test_profiles_show_the_forward_of_torchs_layers(handle: autoamp.Handle) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.ones(2, 4)
    with cProfile.Profile() as profile:
        model(x)
    shown: Any = pstats.Stats(profile)
    names = [(Path(file).stem, function) for file, _, function in shown.stats]
    assert {("linear", "forward"), ("normalization", "forward"), ("module", "_call_impl")} <= set(names)


def test_torchs_profiler_finds_the_module_in_a_calls_first_frame(handle: autoamp.Handle) -> None:
    # It reads the variable as the frame begins, and crashes where there is none.
    code = nn.Module.__call__.__code__
    assert code.co_varnames[0] == "self"
    assert code.co_argcount == 1
