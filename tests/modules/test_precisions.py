"""Precision by module: by class, by path, by hand; and that it comes undone."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import re
import subprocess
import sys
import textwrap
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.runtime import runtime_of
from tests.modules.watches import FP32, HALF, Other, Outer, Watch, computed, marks, start

WATCH, OTHER = (f"{cls.__module__}.{cls.__name__}" for cls in (Watch, Other))


def test_errors(handle: autoamp.Handle) -> None:
    with pytest.raises(autoamp.UsageError, match=r"precision='fp8' is unknown; choose 'fp32', 'fp16' or 'none'"):
        handle.override(nn.Linear(2, 2), "fp8")
    with pytest.raises(autoamp.UsageError, match=r"takes a torch\.nn\.Module, not"):
        handle.override(torch.relu, "fp32")  # type: ignore[arg-type]
    assert not runtime_of(handle).precisions.any


def test_an_exception_undoes_the_override(handle: autoamp.Handle) -> None:
    model = Outer()

    def fail() -> None:
        with handle.override(model, "fp32"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not marks(model)
    assert set(computed(model)) == {HALF}


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
    assert not runtime_of(handle).precisions.any


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
    assert not runtime_of(handle).precisions.any


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


# -- classes in a list --


def test_a_class_by_where_it_is_defined() -> None:
    start({WATCH: "fp32"})
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
    start({"torch.nn.Module": "none", WATCH: "fp32", OTHER: "fp16"})
    watch, other = Watch(), Other()
    watch(torch.randn(2, 4).half())
    other(torch.randn(2, 4))
    assert watch.seen == [FP32, FP32]
    assert other.seen[0] == HALF


def test_none_in_a_list_takes_the_entry_away() -> None:
    start({WATCH: "none"})
    watch = Watch()
    watch(torch.randn(2, 4))
    assert watch.seen == [FP32, HALF]


def test_an_override_by_hand_goes_over_a_class() -> None:
    handle = start({WATCH: "fp32"})
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
        ({WATCH: "fp32", "last": "none"}, [FP32, FP32, FP32, HALF]),
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
    classes = any(name == WATCH for name in modules)
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
    handle = start({"torch.nn.LayerNorm": "fp32", WATCH: "fp32"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.override(Outer()).undo()


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
