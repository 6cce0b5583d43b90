"""Precision by module: by class, by path, by hand; and that it comes undone."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import itertools
import pickle
import subprocess
import sys
import textwrap
import threading
import types
import warnings
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.modules.recompute import build_recompute

HALF, FP32 = torch.float16, torch.float32
LISTS: dict[str, Any] = {"extends": [], "fp16": ["linear", "mm"], "fp32": ["softmax", "exp"]}


def start(modules: dict[str, str] | None = None, **settings: Any) -> autoamp.Handle:
    handle = autoamp.init(device_type="cpu", dtype=HALF, lists={**LISTS, "modules": modules or {}}, **settings)
    assert isinstance(handle, autoamp.Handle)
    return handle


@pytest.fixture
def handle() -> autoamp.Handle:
    return start()


class Watch(nn.Module):
    """A linear layer that notes the dtypes which come in, go through and, in backward, come back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []
        self.returned: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.seen = [x.dtype, y.dtype]
        if y.requires_grad:
            y.register_hook(lambda gradient: self.returned.append(gradient.dtype))
        return y


class Other(Watch):
    pass


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Watch()
        self.middle = nn.Sequential(Watch(), Watch())
        self.last = Watch()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def watches(model: Outer) -> list[Watch]:
    return [model.first, model.middle[0], model.middle[1], model.last]


def computed(model: Outer) -> list[torch.dtype]:
    model(torch.randn(2, 4))
    return [watch.seen[1] for watch in watches(model)]


def marks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if any("autoamp" in name for name in vars(module))]


# -- handle.override(module, precision) --


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


def test_fp32_equals_plain_torch_on_fp32_inputs(handle: autoamp.Handle) -> None:
    model = Outer()
    x = torch.randn(2, 4)
    with handle.override(model, "fp32"):
        output = model(x.half())
    handle.deactivate()
    assert torch.equal(output, model(x.half().float()))


def test_fp16_gives_half_inputs_and_the_lists_hold_within(handle: autoamp.Handle) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
            return x.dtype, torch.mm(x, x).dtype, torch.exp(x).dtype

    model = Model()
    x = torch.randn(3, 3)
    assert model(x) == (FP32, HALF, FP32)
    with handle.override(model, "fp16"):
        assert model(x) == (HALF, HALF, FP32)
    with handle.override(model, "fp32"):
        assert model(x.half()) == (FP32, FP32, FP32)
    with handle.override(model, "none"):
        assert model(x) == (FP32, FP32, FP32)
        assert model(x.half()) == (HALF, HALF, HALF)
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


def test_nested_arguments_are_cast_and_never_mutated(handle: autoamp.Handle) -> None:
    seen = []

    class Model(nn.Module):
        def forward(self, pair: Any, *, mapping: Any, number: int) -> Any:
            seen.append((pair[0].dtype, mapping["a"][0].dtype, mapping["i"].dtype, number))
            return pair

    pair = [torch.ones(2).half(), None]
    mapping = {"a": (torch.ones(2).half(),), "i": torch.ones(2, dtype=torch.int64)}
    model = Model()
    with handle.override(model, "fp32"):
        returned = model(pair, mapping=mapping, number=3)
    assert seen == [(FP32, FP32, torch.int64, 3)]
    assert returned[0].dtype == FP32
    assert pair[0].dtype == HALF
    assert mapping["a"][0].dtype == HALF


def test_sparse_inputs_are_left_as_they_are(handle: autoamp.Handle) -> None:
    seen = []

    class Model(nn.Module):
        def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
            seen.append((adjacency.dtype, x.dtype))
            return x

    model = Model()
    with handle.override(model, "fp32"):
        model(torch.eye(3).to_sparse().half(), torch.ones(3).half())
    with handle.override(model, "fp16"):
        model(torch.eye(3).to_sparse(), torch.ones(3))
    assert seen == [(HALF, FP32), (FP32, HALF)]


def test_errors(handle: autoamp.Handle) -> None:
    with pytest.raises(autoamp.UsageError, match=r"precision='fp8' is unknown; choose 'fp32', 'fp16' or 'none'"):
        handle.override(nn.Linear(2, 2), "fp8")
    with pytest.raises(autoamp.UsageError, match=r"takes a torch\.nn\.Module, not"):
        handle.override(torch.relu, "fp32")  # type: ignore[arg-type]
    assert not handle.precisions.any


def test_precision_comes_back_after_an_exception(handle: autoamp.Handle) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.mm(x, x).dtype == FP32
            raise KeyError

    model = Fails()
    with handle.override(model, "fp32"), pytest.raises(KeyError):
        model(torch.randn(3, 3))
    assert torch.mm(torch.randn(3, 3), torch.randn(3, 3)).dtype == HALF
    assert not marks(model)
    assert len(handle.cache) == 0


def test_an_exception_undoes_the_block(handle: autoamp.Handle) -> None:
    model = Outer()

    def fail() -> None:
        with handle.override(model, "fp32"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not marks(model)
    assert set(computed(model)) == {HALF}


def test_disable_casts_goes_over_an_override(handle: autoamp.Handle) -> None:
    model = Outer()
    with handle.override(model, "fp16"), handle.disable_casts():
        assert set(computed(model)) == {FP32}


def test_an_autocast_region_goes_over_an_override(handle: autoamp.Handle) -> None:
    model = Watch()
    with handle.override(model, "fp16"), torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(2, 4))
    assert model.seen == [FP32, torch.bfloat16]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_with_the_cache(handle: autoamp.Handle, mode: Any) -> None:
    model = Outer()
    reference = model(torch.ones(2, 4))
    kept = []
    model.last.register_forward_hook(lambda *_: kept.append(len(handle.cache)))
    for precision in ("fp32", "fp16"):
        with handle.override(model.middle, precision), mode(), handle.inference(model.middle):
            torch.testing.assert_close(model(torch.ones(2, 4)), reference, rtol=1e-2, atol=1e-2)
        assert len(handle.cache) == 0
    assert kept == [0, 4]


def test_the_outermost_module_may_be_the_overridden_one(handle: autoamp.Handle) -> None:
    model = Outer()
    kept = []
    model.middle.register_forward_hook(lambda *_: kept.append(len(handle.cache)))
    model.middle[1].layer = model.middle[0].layer
    with handle.override(model, "fp16"):
        model(torch.randn(2, 4))
    assert kept == [2]
    assert len(handle.cache) == 0


# -- undoing --


class Probe(nn.Module):
    """Tells the dtype that comes in, and that of a product within."""

    def forward(self, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
        return x.dtype, torch.mm(x, x).dtype


def test_undo_twice_and_in_any_order(handle: autoamp.Handle) -> None:
    given = [("fp32", (FP32, FP32)), ("none", (HALF, HALF)), ("fp16", (HALF, HALF)), ("fp32", (FP32, FP32))]
    x = torch.randn(3, 3).half()
    for order in itertools.permutations(range(len(given))):
        model = Probe()
        overrides = [handle.override(model, precision) for precision, _ in given]
        standing = list(range(len(given)))
        for index in order:
            assert model(x) == given[standing[-1]][1], order
            overrides[index].undo()
            overrides[index].undo()
            standing.remove(index)
        assert not marks(model)
        assert model(x.float()) == (FP32, HALF)
    assert not handle.precisions.any


def test_inner_undone_after_outer(handle: autoamp.Handle) -> None:
    model = Outer()
    outer, inner = handle.override(model, "fp32"), handle.override(model.middle, "fp16")
    assert computed(model) == [FP32, HALF, HALF, FP32]
    outer.undo()
    assert computed(model) == [HALF, HALF, HALF, HALF]
    inner.undo()
    assert computed(model) == [HALF] * 4
    assert not marks(model)


def test_deactivate_undoes_everything(handle: autoamp.Handle) -> None:
    model = Outer()
    handle.override(model, "fp32")
    override = handle.override(model.middle, "fp16")
    handle.deactivate()
    assert not marks(model)
    override.undo()
    assert set(computed(model)) == {FP32}
    start()
    assert set(computed(model)) == {HALF}


def test_models_are_freed(handle: autoamp.Handle) -> None:
    model = Outer()
    override = handle.override(model, "fp32")
    computed(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    override.undo()
    assert not handle.precisions.any


# -- copies --


def test_a_copy_is_not_overridden_after_the_undo(handle: autoamp.Handle) -> None:
    model = Outer()
    override = handle.override(model.middle, "fp32")
    clone = copy.deepcopy(model)
    assert computed(clone) == [HALF, FP32, FP32, HALF]
    override.undo()
    assert computed(clone) == [HALF] * 4
    with handle.override(clone, "fp32"):
        assert computed(clone) == [FP32] * 4
        assert computed(model) == [HALF] * 4
    assert computed(clone) == [HALF] * 4


def test_a_copy_has_weights_of_its_own(handle: autoamp.Handle) -> None:
    model = Watch()
    with handle.override(model, "fp32"):
        clone = copy.deepcopy(model)
        with torch.no_grad():
            clone.layer.weight.zero_()
            clone.layer.bias.zero_()
        assert not clone(torch.randn(2, 4)).any()
        assert model(torch.randn(2, 4)).any()


def test_state_dict_and_parameters_know_nothing_of_it(handle: autoamp.Handle) -> None:
    model = Outer()
    names, state = dict(model.named_modules()).keys(), model.state_dict().keys()
    with handle.override(model, "fp32"):
        assert dict(model.named_modules()).keys() == names
        assert model.state_dict().keys() == state


def test_pickles_within_this_process(handle: autoamp.Handle) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    override = handle.override(model, "fp32")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    assert [loaded(torch.randn(2, 4)).dtype for loaded in copies] == [FP32, FP32]
    override.undo()
    assert [loaded(torch.randn(2, 4)).dtype for loaded in copies] == [HALF, HALF]


def test_a_saved_model_loads_without_autoamp(handle: autoamp.Handle, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with handle.override(model[0], "fp32"):
        torch.save(model, tmp_path / "model.pt")
    script = """
        import sys
        sys.modules["autoamp"] = None
        import torch
        model = torch.load(sys.argv[1], weights_only=False)
        print(model(torch.ones(1, 4)).dtype)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "torch.float32", done.stderr


# -- threads --


def test_other_threads_see_the_override_but_not_its_switch(handle: autoamp.Handle) -> None:
    model, plain = Watch(), Watch()
    meet = threading.Barrier(2)
    seen = []

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.watch = model

        def forward(self, x: Tensor) -> Tensor:
            meet.wait(timeout=30)
            y = self.watch(x)
            meet.wait(timeout=30)
            return y

    slow = Slow()

    def beside() -> None:
        meet.wait(timeout=30)
        plain(torch.randn(2, 4))
        seen.append(plain.seen)
        meet.wait(timeout=30)

    thread = threading.Thread(target=beside)
    with handle.override(slow, "fp32"):
        thread.start()
        slow(torch.randn(2, 4))
        thread.join()
        assert model.seen == [FP32, FP32]
        thread = threading.Thread(target=lambda: computed_in_thread.append(watched(slow.watch, handle)))
        computed_in_thread: list[Any] = []
        thread.start()
        thread.join()
    assert seen == [[FP32, HALF]]
    assert computed_in_thread == [[FP32, HALF]]


def watched(model: Watch, handle: autoamp.Handle) -> list[torch.dtype]:
    model(torch.randn(2, 4))
    return model.seen


def test_a_region_s_override_does_nothing_in_other_threads() -> None:
    model = Watch()
    with autoamp.region(device_type="cpu", dtype=HALF, lists=LISTS) as handle, handle.override(model, "fp16"):
        thread = threading.Thread(target=model, args=(torch.randn(2, 4),))
        thread.start()
        thread.join()
        assert model.seen == [FP32, FP32]
        model(torch.randn(2, 4))
        assert model.seen == [HALF, HALF]


# -- classes in a list --


def test_a_class_by_where_it_is_defined() -> None:
    start({f"{__name__}.Watch": "fp32"})
    watch, other = Watch(), Other()
    watch(torch.randn(2, 4).half())
    other(torch.randn(2, 4))
    assert watch.seen == [FP32, FP32]
    assert other.seen == [FP32, FP32]


@pytest.mark.parametrize("name", ["torch.nn.Linear", "torch.nn.modules.linear.Linear", "torch.nn.modules.Linear"])
def test_a_class_by_any_of_its_names(name: str) -> None:
    start({name: "fp32"})
    x = torch.randn(2, 4)
    assert nn.Linear(4, 4)(x.half()).dtype == FP32
    assert nn.LazyLinear(4)(x).dtype == FP32
    assert F.linear(x, torch.randn(4, 4)).dtype == HALF


def test_the_later_class_wins() -> None:
    start({"torch.nn.Module": "none", f"{__name__}.Watch": "fp32", f"{__name__}.Other": "fp16"})
    watch, other = Watch(), Other()
    watch(torch.randn(2, 4).half())
    other(torch.randn(2, 4))
    assert watch.seen == [FP32, FP32]
    assert other.seen[0] == HALF


def test_none_in_a_list_takes_the_entry_away() -> None:
    start({f"{__name__}.Watch": "none"})
    watch = Watch()
    watch(torch.randn(2, 4))
    assert watch.seen == [FP32, HALF]


def test_an_override_by_hand_goes_over_a_class() -> None:
    handle = start({f"{__name__}.Watch": "fp32"})
    model = Outer()
    assert computed(model) == [FP32] * 4
    with handle.override(model.first, "fp16"):
        assert computed(model) == [HALF, FP32, FP32, FP32]
    assert computed(model) == [FP32] * 4


def test_a_class_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    start({"module_of_tomorrow.Late": "fp32"})
    module = types.ModuleType("module_of_tomorrow")

    class Late(Watch):
        pass

    module.Late = Late  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "module_of_tomorrow", module)
    model = Late()
    model(torch.randn(2, 4))
    assert model.seen == [FP32, FP32]


def test_classes_of_a_handle_that_is_gone_do_nothing() -> None:
    start({"torch.nn.Linear": "fp32"}).deactivate()
    start()
    assert nn.Linear(4, 4)(torch.randn(2, 4)).dtype == HALF


# -- paths in a list --


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({"middle.0": "fp32"}, [HALF, FP32, HALF, HALF]),
        ({"middle.*": "fp32"}, [HALF, FP32, FP32, HALF]),
        ({"*.layer": "fp32"}, [FP32, FP32, FP32, FP32]),
        ({"middle": "fp32", "middle.1": "fp16"}, [HALF, FP32, HALF, HALF]),
        ({"middle.?": "fp32", "middle.1": "none"}, [HALF, FP32, HALF, HALF]),
        ({"[fl]*st": "fp32"}, [FP32, HALF, HALF, FP32]),
        ({f"{__name__}.Watch": "fp32", "last": "none"}, [FP32, FP32, FP32, HALF]),
        ({"middle.?": "fp16", "middle.0": "fp32"}, [HALF, FP32, HALF, HALF]),
    ],
    ids=str,
)
def test_paths(modules: dict[str, str], expected: list[torch.dtype]) -> None:
    handle = start(modules)
    model = Outer()
    with handle.override(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert computed(model) == expected
    assert not marks(model)
    classes = any(name.startswith(__name__) for name in modules)
    assert computed(model) == [FP32 if classes else HALF] * 4


def test_a_pattern_that_matches_nothing_warns_with_the_nearest() -> None:
    handle = start({"midle.0": "fp32", "first": "fp32"})
    model = Outer()
    with pytest.warns(
        UserWarning, match=r"lists=: 'midle.0' matches no module of Outer; did you mean 'middle.0'"
    ) as caught:
        override = handle.override(model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert computed(model) == [FP32, HALF, HALF, HALF]
    override.undo()


def test_class_entries_are_no_unmatched_paths() -> None:
    handle = start({"torch.nn.LayerNorm": "fp32", f"{__name__}.Watch": "fp32"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.override(Outer()).undo()


def test_a_class_that_is_nowhere_warns() -> None:
    handle = start({"torch.nn.LayerNrom": "fp32"})
    with pytest.warns(UserWarning, match="'torch.nn.LayerNrom' matches no module"):
        handle.override(Outer())


# -- the patched call itself --


def test_hooks_and_results_are_those_of_the_module(handle: autoamp.Handle) -> None:
    model = nn.Linear(4, 4)
    order = []
    model.register_forward_pre_hook(lambda *_: order.append("before"))
    model.register_forward_hook(lambda *_: order.append("after"))
    model(torch.randn(2, 4))
    assert order == ["before", "after"]
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"


def test_modules_called_by_keyword(handle: autoamp.Handle) -> None:
    model = nn.Linear(4, 4)
    with handle.override(model, "fp32"):
        assert model(input=torch.randn(2, 4).half()).dtype == FP32


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


@pytest.fixture
def recomputing(handle: autoamp.Handle, monkeypatch: pytest.MonkeyPatch) -> autoamp.Handle:
    """What keeps a function for backward, patched; whether or not the handle patches it too."""
    for owner, name, position in (
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", 0),
        (torch.utils.checkpoint.CheckpointFunction, "forward", 1),
    ):
        original = inspect.getattr_static(owner, name)
        monkeypatch.setattr(owner, name, build_recompute(original, handle.casts, position))
    return handle


class Checkpointed(nn.Module):
    """Checkpoints what is within, as models do on their own."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.watch = Watch()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.watch, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("within", [False, True], ids=["backward after", "backward within"])
def test_checkpoints_within_an_override(recomputing: autoamp.Handle, use_reentrant: bool, within: bool) -> None:
    model = Checkpointed(use_reentrant)
    x = torch.randn(2, 4, requires_grad=True)
    with recomputing.override(model, "fp32"):
        output = model(x)
        if within:
            output.sum().backward()
    if not within:
        output.sum().backward()
    assert model.watch.seen == [FP32, FP32]
    assert model.watch.returned == [FP32]
    assert recomputing.casts.local.on
    assert model(x).dtype == HALF


def test_checkpoints_within_disable_casts(recomputing: autoamp.Handle) -> None:
    model = Checkpointed(use_reentrant=False)
    with recomputing.disable_casts():
        output = model(torch.randn(2, 4))
    output.sum().backward()
    assert model.watch.seen == [FP32, FP32]
    assert recomputing.casts.local.on
    assert not {"on", "forced_off"} & vars(recomputing.casts.local).keys()


def test_recomputation_in_another_thread() -> None:
    with autoamp.region(device_type="cpu", dtype=HALF, lists=LISTS) as handle:
        kept = handle.casts.remembered(lambda x: torch.mm(x, x).dtype)
        seen = []
        thread = threading.Thread(target=lambda: seen.extend([kept(torch.ones(2, 2)), handle.casts.local.on]))
        thread.start()
        thread.join()
        assert seen == [HALF, False]


def test_checkpointed_override(handle: autoamp.Handle) -> None:
    model = Watch()
    x = torch.randn(2, 4, requires_grad=True)
    with handle.override(model, "fp32"):
        checkpoint(model, x, use_reentrant=False).sum().backward()
        assert model.seen == [FP32, FP32]
    assert x.grad is not None


def test_threads_of_data_parallel_cast_as_the_thread_that_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    # What parallel_apply asks of an accelerator, answered by the CPU.
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    model, inputs, half = nn.Linear(3, 3), [(torch.randn(2, 3),)] * 2, torch.bfloat16

    def dtypes(function: Any) -> set[torch.dtype]:
        return {output.dtype for output in function([model, model], inputs)}

    names = ("torch.nn.parallel", "torch.nn.parallel.data_parallel", "torch.nn.parallel.parallel_apply")
    with autoamp.region(device_type="cpu", dtype=half):
        for name in names:
            assert dtypes(sys.modules[name].parallel_apply) == {half}
    handle = autoamp.init(device_type="cpu", dtype=half)
    assert dtypes(torch.nn.parallel.parallel_apply) == {half}
    with handle.disable_casts():
        assert dtypes(torch.nn.parallel.parallel_apply) == {torch.float32}
    with torch.autocast("cpu", enabled=False):
        assert dtypes(torch.nn.parallel.parallel_apply) == {torch.float32}
    handle.deactivate()
    assert dtypes(torch.nn.parallel.parallel_apply) == {torch.float32}


class Projects(torch.autograd.Function):
    """A function whose backward calls a listed op, and notes in which dtype it ran."""

    seen: ClassVar[list[torch.dtype]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        Projects.seen.append(F.linear(x, weight).dtype)
        return gradient @ weight.to(gradient.dtype), gradient.T @ x.to(gradient.dtype)


def test_backward_of_a_custom_function_casts_as_its_forward_in_whatever_thread() -> None:
    x, weight = torch.randn(2, 3), torch.randn(3, 3, requires_grad=True)
    half = torch.bfloat16

    def backward(output: Tensor) -> torch.dtype:
        thread = threading.Thread(target=output.float().sum().backward)
        thread.start()
        thread.join()
        return Projects.seen.pop()

    with autoamp.region(device_type="cpu", dtype=half):
        output = Projects.apply(x, weight)
        # Another thread is off by default; autograd's own on CUDA is one.
        assert backward(output) is half
    handle = autoamp.init(device_type="cpu", dtype=half)
    with handle.disable_casts():
        output = Projects.apply(x, weight)
    assert backward(output) is torch.float32
    output = Projects.apply(x, weight)
    with handle.disable_casts():
        output.float().sum().backward()
    assert Projects.seen.pop() is half
    # The graph outlives the handle.
    output = Projects.apply(x, weight)
    handle.deactivate()
    assert backward(output) is torch.float32
    other = autoamp.init(device_type="cpu", dtype=torch.float16)
    with other.disable_casts():
        assert backward(Projects.apply(x, weight)) is torch.float32
    compiled = torch.compile(lambda a: Projects.apply(a, weight), backend="aot_eager")
    assert compiled(x).dtype is torch.float16
    torch._dynamo.reset()
