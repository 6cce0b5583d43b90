"""Precision by module: by class, by path, by hand; and that it comes undone."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import re
import sys
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.core import runtime_of
from tests.core.modules.watches import FP32, HALF, Calls, Other, Outer, Watch, computed, marks, start

WATCH, OTHER = (f"{cls.__module__}.{cls.__name__}" for cls in (Watch, Other))


def test_override_refuses_unknown_precisions(handle: autoamp.Handle) -> None:
    with pytest.raises(
        autoamp.UsageError, match=r"precision='fp8' is unknown; choose 'fp32', 'fp16', 'half' or 'none'"
    ):
        handle.override(nn.Linear(2, 2), "fp8")
    assert not runtime_of(handle).precisions.any


def test_code_that_was_compiled_before_sees_an_override(handle: autoamp.Handle) -> None:
    layer = nn.Linear(2, 2)
    model, x = torch.compile(nn.Sequential(layer, nn.ReLU()), backend="eager"), torch.ones(1, 2)
    assert model(x).dtype is HALF
    with handle.override(layer, "fp32"):
        assert model(x).dtype is FP32
    assert model(x).dtype is HALF


def test_an_exception_undoes_the_override(handle: autoamp.Handle) -> None:
    def fail(x: Tensor) -> None:
        assert torch.mm(x, x).dtype == FP32
        raise KeyError

    model, x = Calls(fail), torch.randn(3, 3)
    with pytest.raises(KeyError), handle.override(model, "fp32"):
        model(x)
    assert not marks(model)
    assert torch.mm(x, x).dtype == HALF
    assert len(handle.cache) == 0


# -- undoing --


def dtypes_within(x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Tell the dtype that comes in, and that of a product within."""
    return x.dtype, torch.mm(x, x).dtype


def test_undo_twice_and_in_any_order(handle: autoamp.Handle) -> None:
    given = [("fp32", (FP32, FP32)), ("none", (HALF, HALF)), ("fp16", (HALF, HALF)), ("fp32", (FP32, FP32))]
    x = torch.randn(3, 3).half()
    for order in itertools.permutations(range(len(given))):
        model = Calls(dtypes_within)
        overrides = [handle.override(model, precision) for precision, _ in given]
        standing = list(range(len(given)))
        for index in order:
            assert model(x) == given[standing[-1]][1], order
            overrides[index].undo()
            overrides[index].undo()
            standing.remove(index)
        assert not marks(model)
        assert model(x.float()) == (FP32, HALF)
    assert not runtime_of(handle).precisions.any


# -- copies --


def test_a_copy_is_not_overridden_after_the_undo(handle: autoamp.Handle) -> None:
    model = Outer()
    override = handle.override(model.middle, "fp32")
    clone = copy.deepcopy(model)
    assert computed(clone) == [HALF, FP32, FP32, HALF]
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.zero_()
    assert not clone(torch.randn(2, 4)).any()
    assert model(torch.randn(2, 4)).any()
    override.undo()
    assert computed(clone) == [HALF] * 4
    with handle.override(clone, "fp32"):
        assert computed(clone) == [FP32] * 4
        assert computed(model) == [HALF] * 4
    assert computed(clone) == [HALF] * 4
    reference = weakref.ref(model)
    override = handle.override(model, "fp32")
    del model
    gc.collect()
    assert reference() is None
    override.undo()
    assert not runtime_of(handle).precisions.any


def test_state_dict_and_parameters_know_nothing_of_it(handle: autoamp.Handle) -> None:
    model = Outer()
    names, state = dict(model.named_modules()).keys(), model.state_dict().keys()
    with handle.override(model, "fp32"):
        assert dict(model.named_modules()).keys() == names
        assert model.state_dict().keys() == state


class WithoutAutoamp(pickle.Unpickler):
    def find_class(self, module_name: str, name: str) -> Any:
        assert not module_name.startswith("autoamp")
        return super().find_class(module_name, name)


def test_an_overridden_module_is_pickled_without_autoamp(handle: autoamp.Handle) -> None:
    model, x, buffer = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), io.BytesIO()
    override = handle.override(model, "fp32")
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [WithoutAutoamp(io.BytesIO(pickle.dumps(model))).load(), torch.load(buffer, weights_only=False)]
    assert [loaded(x).dtype for loaded in copies] == [FP32, FP32]
    override.undo()
    assert [loaded(x).dtype for loaded in copies] == [HALF, HALF]


# -- classes in a list --


@pytest.mark.parametrize("name", ["torch.nn.Linear", "torch.nn.modules.linear.Linear", "torch.nn.modules.Linear"])
def test_a_class_by_any_of_its_names(name: str) -> None:
    handle = start({name: "fp32"})
    x = torch.randn(2, 4)
    assert nn.Linear(4, 4)(x.half()).dtype == FP32
    assert nn.LazyLinear(4)(x).dtype == FP32
    assert F.linear(x, torch.randn(4, 4)).dtype == HALF
    handle.deactivate()
    start()
    assert nn.Linear(4, 4)(x).dtype == HALF


@pytest.mark.parametrize(
    ("modules", "of_watch", "of_other"),
    [
        ({WATCH: "fp32"}, [FP32, FP32], [FP32, FP32]),
        # The later class wins.
        ({"torch.nn.Module": "none", WATCH: "fp32", OTHER: "fp16"}, [FP32, FP32], [HALF, HALF]),
        ({WATCH: "none"}, [HALF, HALF], [HALF, HALF]),
    ],
)
def test_a_class_and_those_derived_from_it(
    modules: dict[str, str], of_watch: list[torch.dtype], of_other: list[torch.dtype]
) -> None:
    handle = start(modules)
    watch, other = Watch(), Other()
    for model, seen in ((watch, of_watch), (other, of_other)):
        model(torch.randn(2, 4).half())
        assert model.seen == seen
        with handle.override(model, "fp16"):
            model(torch.randn(2, 4))
        assert model.seen == [HALF, HALF]


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
        ({WATCH: "fp32", "last": "none"}, [FP32, FP32, FP32, HALF]),
        ({"middle.?": "fp16", "middle.0": "fp32"}, [HALF, FP32, HALF, HALF]),
        ({"torch.nn.LayerNorm": "fp32", "first": "fp32"}, [FP32, HALF, HALF, HALF]),
    ],
    ids=str,
)
def test_a_path_in_a_list_sets_the_precision_of_what_it_matches(
    modules: dict[str, str], expected: list[torch.dtype]
) -> None:
    handle = start(modules)
    model = Outer()
    with handle.override(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert computed(model) == expected
    assert not marks(model)
    classes = any(name == WATCH for name in modules)
    assert computed(model) == [FP32 if classes else HALF] * 4


def test_a_class_that_torch_has_not_is_an_error_with_the_nearest() -> None:
    with pytest.raises(autoamp.ListFileError, match=r"no 'LayerNrom'; did you mean 'torch\.nn\.LayerNorm'"):
        start({"torch.nn.LayerNrom": "fp32"})


@pytest.mark.parametrize(
    ("lists", "meant"),
    [
        ({"modules": {"nn.Linear": "fp32"}}, "torch.nn.Linear"),
        ({"modules": {"nn.modules.Linear": "fp32"}}, "torch.nn.modules.Linear"),
        ({"fp32": ["F.softmax"]}, "torch.nn.functional.softmax"),
        ({"fp32": ["Tensor.softmax"]}, "torch.Tensor.softmax"),
        ({"fp32": ["nn.functional.softmax"]}, "torch.nn.functional.softmax"),
    ],
)
def test_a_name_as_programs_import_it_is_an_error_with_its_whole_name(lists: dict[str, Any], meant: str) -> None:
    with pytest.raises(autoamp.ListFileError, match=rf"did you mean '{re.escape(meant)}'"):
        autoamp.init(device_type="cpu", lists=lists)
    assert autoamp.current_handle() is None


# -- lifetime --


def test_nothing_is_kept_of_modules_that_are_gone(handle: autoamp.Handle) -> None:
    def kept() -> bool:
        gc.collect()
        return runtime_of(handle).precisions.any

    model = Outer()
    handle.override(model.middle, "fp32")
    clone = copy.deepcopy(model)
    del model
    assert kept()
    assert computed(clone) == [HALF, FP32, FP32, HALF]
    twin = copy.copy(copy.deepcopy(clone))
    del clone
    assert computed(twin) == [HALF, FP32, FP32, HALF]
    del twin
    assert not kept()
    for _ in range(3):
        handle.override(nn.Linear(1, 1), "fp32")
    assert not kept()
