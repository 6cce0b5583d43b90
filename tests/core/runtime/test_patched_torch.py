"""Installing: all patches or none, names taken early and late, targets of modules that come later, compilers."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit._builtins import _get_builtin_table

import autoamp
from autoamp.core import Handle, original_of
from autoamp.core.patches import mark_of
from tests.core.runtime import shared
from tests.core.runtime.shared import HALF, ones

LISTS: dict[str, Any] = {
    "extends": [],
    "fp16": ["linear", "matmul", "__matmul__", "conv2d", "einsum", "bmm"],
    "fp32": ["softmax", "exp", "layer_norm"],
}
ROOT = Path(__file__).resolve().parents[3]


def init(**changes: Any) -> Handle:
    return shared.init(**{"lists": LISTS, "rebind": True, **changes})


def with_targets(**targets: list[str]) -> dict[str, Any]:
    return {**LISTS, **{policy: [*LISTS.get(policy, []), *names] for policy, names in targets.items()}}


@pytest.fixture
def user() -> Iterator[types.ModuleType]:
    """A module that took names from torch before any init."""
    module = types.ModuleType("early_user")
    source = "from torch.nn.functional import softmax, linear as lin\nfrom torch import matmul\n"
    exec(source + "def within(x): return softmax(x, 0)\n", vars(module))
    sys.modules["early_user"] = module
    yield module
    del sys.modules["early_user"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path, whose modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def package(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir()
    for file, text in {"__init__": "", **files}.items():
        (folder / name / f"{file}.py").write_text(textwrap.dedent(text))


# -- restored exactly --


def test_every_patched_attribute_is_the_identical_object_again() -> None:
    owners = (torch, F, Tensor, nn.Module, torch.autograd, torch.nn.utils)
    before = [dict(vars(owner)) for owner in owners]
    handle = autoamp.init(device_type="cpu", dtype=HALF)
    changed = [
        name for owner, own in zip(owners, before, strict=True) for name in vars(owner)
        if vars(owner)[name] is not own.get(name)
    ]  # fmt: skip
    assert len(changed) > 200
    # Some were inherited before.
    assert vars(Tensor).keys() - before[2].keys()
    assert handle.deactivate() == ()
    # The fixture for every test compares the identity of each attribute of torch with the start.
    assert [dict(vars(owner)) for owner in owners] == before


def test_aliases_stay_one_object() -> None:
    init()
    assert F.conv2d is torch.conv2d
    assert F.conv2d is not original_of(F.conv2d)
    assert torch.functional.einsum is torch.einsum
    assert torch.einsum is not original_of(torch.einsum)


def stubborn(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Let there be a module ``stubborn`` whose functions cannot be replaced at the first attempt."""
    attempts = iter([RuntimeError("half way")])

    class Stubborn(types.ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            if value is not vars(self)[name]:
                for error in attempts:
                    raise error
            super().__setattr__(name, value)

    module = Stubborn("stubborn")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, "stubborn", module)


@pytest.mark.parametrize(
    ("failing", "is_first"),
    [("target", False), ("name", False), ("name", True), ("function that torch lacks", True)],
)
def test_an_init_that_fails_leaves_torch_and_the_handle_before_as_they_were(
    failing: str, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = {"target": {"work": lambda x: x}, "name": {"lin": F.linear}}.get(failing)
    targets = ["stubborn.work"] if failing == "target" else []
    first = None if is_first else init()
    if functions is not None:
        stubborn(monkeypatch, **functions)
    else:
        monkeypatch.delattr(torch.nn.utils, "clip_grad_value_")
    scripted = dict(_get_builtin_table())
    with pytest.raises((RuntimeError, AttributeError), match=r"half way|clip_grad_value_"):
        init(dtype=torch.bfloat16, lists=with_targets(fp32=["not_there_yet.focal", *targets]))
    assert autoamp.current_handle() is first
    assert F.linear(ones(), ones()).dtype == (torch.float32 if is_first else HALF)
    assert (original_of(F.linear) is F.linear) is is_first
    if first is None:
        assert _get_builtin_table() == scripted
    else:
        assert first.deactivate() == ()


# -- others who patch --


def test_a_patch_above_ours_is_left_and_reported_and_nothing_deepens() -> None:
    linear, first = F.linear, init()
    below = F.linear
    F.linear = foreign = lambda *args: below(*args)
    try:
        assert F.linear(ones(), ones()).dtype == HALF
        assert first.deactivate() == ("torch.nn.functional.linear",)
        for _ in range(3):
            assert F.linear is foreign
            assert F.linear(ones(), ones()).dtype == torch.float32
            handle = init()
            # Ours is above theirs now, and theirs is called.
            assert original_of(F.linear) is foreign
            assert F.linear(ones(), ones()).dtype == HALF
            assert handle.deactivate() == ()
    finally:
        F.linear = linear


# -- names that others took --


def test_names_taken_before_init_are_rebound_and_restored(user: types.ModuleType) -> None:
    before = dict(vars(user))
    handle = init()
    assert {"early_user.softmax", "early_user.lin", "early_user.matmul"} <= set(handle.late_bound)
    assert user.softmax is F.softmax
    assert user.lin(ones(), ones()).dtype == HALF
    assert user.within(ones(HALF)).dtype == torch.float32
    handle.deactivate()
    assert dict(vars(user)) == before
    assert handle.late_bound == ()


def test_rebind_false_leaves_what_was_taken_before(user: types.ModuleType) -> None:
    before = dict(vars(user))
    handle = init(rebind=False)
    assert handle.late_bound == ()
    assert dict(vars(user)) == before
    assert F.linear(ones(), ones()).dtype == HALF


# -- targets of modules that come later --


def test_deferred_targets_are_patched_once_their_module_is_there(folder: Path) -> None:
    package(
        folder,
        "later",
        __init__="from later.model import Net\n",
        model="class Net:\n    def run(self, x): return x.dtype\n    @staticmethod\n    def static(x): return x.dtype\n"
        "    @classmethod\n    def made(cls, x): return cls.__name__, x.dtype\n",
        losses="def focal(x): return x.dtype\ndef untouched(x): return x.dtype\n",
        trainer="from later.losses import focal\ndef train(x): return focal(x)\n",
    )
    names = ["later.model.Net.run", "later.model.Net.static", "later.model.Net.made", "later.losses.focal"]
    handle = init(lists=with_targets(fp16=names))
    assert not any(name.startswith("later") for name in sys.modules)
    later = importlib.import_module("later")
    assert later.Net().run(ones()) == HALF
    assert later.Net.static(ones()) == HALF
    assert later.Net().static(ones()) == HALF
    assert later.Net.made(ones()) == ("Net", HALF)
    assert "later.losses" not in sys.modules
    trainer = importlib.import_module("later.trainer")
    losses = sys.modules["later.losses"]
    assert trainer.train(ones()) == HALF
    assert losses.untouched(ones()) == torch.float32
    before = {name: original_of(value) for name, value in vars(later.Net).items()}
    assert handle.deactivate() == ()
    assert dict(vars(later.Net)) == before
    assert trainer.focal is losses.focal
    assert trainer.train(ones()) == torch.float32


def test_a_typo_in_a_deferred_target_warns_once_and_the_import_goes_on(folder: Path) -> None:
    package(folder, "typo", losses="def focal(x): return x.dtype\n")
    init(lists=with_targets(fp16=["typo.losses.focla", "typo.losses.focal"]))
    with pytest.warns(UserWarning, match=r"a rule has no effect.*did you mean 'typo.losses.focal'\?") as caught:
        losses = importlib.import_module("typo.losses")
    assert len(caught) == 1
    assert losses.focal(ones()) == HALF


def test_a_deferred_target_that_cannot_be_written_warns_and_the_import_goes_on(folder: Path) -> None:
    (folder / "unwritable.py").write_text("Alias = int\n")
    init(lists=with_targets(fp16=["unwritable.Alias.bit_length"]))
    with pytest.warns(UserWarning, match=r"a rule has no effect: int\.bit_length cannot be replaced"):
        importlib.import_module("unwritable")
    assert F.linear(ones(), ones()).dtype == HALF


# -- replacements are like the originals --


PICKLED = ["torch.matmul", "F.linear", "F.softmax", "torch.einsum", "torch.conv2d", "Tensor.softmax", "Tensor.exp_"]


def test_replacements_pickle_by_name_and_load_as_originals_in_a_fresh_process(tmp_path: Path) -> None:
    init()
    values = [eval(name) for name in PICKLED]
    assert all(original_of(value) is not value for value in values)
    assert pickle.loads(pickle.dumps(values)) == values
    (tmp_path / "pickled").write_bytes(pickle.dumps(values))
    run(
        f"""
        import pickle, torch, torch.nn.functional as F
        from torch import Tensor
        values = pickle.load(open({str(tmp_path / "pickled")!r}, "rb"))
        assert [v is eval(n) or v == eval(n) for v, n in zip(values, {PICKLED!r})] == [True] * {len(PICKLED)}
        import sys; assert "autoamp" not in sys.modules
        """
    )


@pytest.mark.parametrize("target", ["torch.einsum", "torch.norm"])
def test_a_function_that_is_patched_elsewhere_than_where_it_is_defined_pickles(target: str) -> None:
    init(lists={"extends": [], "fp32": [target]})
    function = getattr(torch, target.partition(".")[2])
    assert original_of(function) is not function
    assert pickle.loads(pickle.dumps(function)) is function


# -- many cycles --


def depth(function: Any) -> int:
    count = 0
    while (mark := mark_of(function)) is not None:
        function, count = mark.original, count + 1
    return count


def cycle() -> tuple[int, weakref.ref[Any], weakref.ref[Any]]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = init(lists=with_targets(fp32=["never_there.focal"]), loss_scale=1.0)
    with handle.scale_loss(model(ones()).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    found = max(depth(F.linear), depth(torch.exp), depth(vars(Tensor)["exp_"]), depth(nn.Module.__call__))
    handle.deactivate()
    return found, weakref.ref(model), weakref.ref(optimizer)


def test_fifty_cycles_leave_nothing_behind(collected: Any) -> None:
    for _ in range(3):
        cycle()
    collected()
    counts = len(gc.get_objects()), len(_get_builtin_table()), len(sys.meta_path)
    cycles = [cycle() for _ in range(50)]
    assert {found for found, _, _ in cycles} == {1}
    collected()
    assert [reference() for _, *references in cycles for reference in references] == [None] * 100
    del cycles
    now = len(gc.get_objects()), len(_get_builtin_table()), len(sys.meta_path)
    assert now[1:] == counts[1:]
    # A thing kept for each cycle would be 50 objects and more.
    assert now[0] - counts[0] < 25


# -- threads --


def test_patching_in_one_thread_while_others_call() -> None:
    stop, x = threading.Event(), ones()

    def call() -> set[torch.dtype]:
        seen: set[torch.dtype] = set()
        while not stop.is_set():
            seen |= {F.linear(x, x).dtype, (x @ x).dtype, torch.einsum("ij,jk->ik", x, x).dtype, x.exp().dtype}
        return seen

    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(call) for _ in range(3)]
        try:
            for _ in range(20):
                init().deactivate()
        finally:
            stop.set()
    assert all(one.result() <= {HALF, torch.float32} for one in calls)


def test_handles_that_come_and_go_in_several_threads_at_once() -> None:
    def come_and_go(dtype: torch.dtype) -> None:
        for _ in range(8):
            init(dtype=dtype).deactivate()

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(come_and_go, (HALF, torch.bfloat16, HALF))) == [None] * 3


# -- compilers --


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), nn.Conv2d(1, 1, 1), nn.LayerNorm(2), nn.Softmax(0), nn.MaxPool2d(1), nn.CrossEntropyLoss()],
)
def test_torchscript_compiles_what_calls_a_patched_function(model: nn.Module) -> None:
    args = (
        (torch.rand(2, 2), torch.tensor([0, 1])) if isinstance(model, nn.CrossEntropyLoss) else (torch.rand(1, 2, 2),)
    )

    def scripted() -> Any:
        # A class of its own each time, since what is compiled is kept by class.
        model.__class__ = type("Own", (type(model),), {"__module__": __name__})
        return torch.jit.script(model)

    handle = init(lists=with_targets(fp32=["max_pool2d", "cross_entropy"]))
    patched = scripted()
    handle.deactivate()
    assert torch.equal(patched(*args), model(*args))
    assert torch.equal(scripted()(*args), model(*args))


def run(code: str) -> str:
    """Run Python in a process of its own, and return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dynamo_and_overrides_take_originals_when_imported_while_patched() -> None:
    run(
        """
        import torch, autoamp
        handle = autoamp.init(device_type="cpu", dtype=torch.float16)
        import torch._dynamo
        from autoamp.core import original_of
        for name in ("utils", "variables.tensor", "variables.torch"):
            module = __import__(f"torch._dynamo.{name}", fromlist=["x"])
            for key, value in vars(module).items():
                # What is patched of Dynamo itself.
                values = [value] if key != "run_node" else []
                if type(value) is dict and not key.startswith("__"):
                    values = [*value.keys(), *value.values()]
                elif type(value) is frozenset:
                    values = value
                assert all(original_of(held) is held for held in values), (name, key)
        torch.overrides.get_testing_overrides()
        handle.deactivate()
        assert torch.matmul in torch.overrides.get_testing_overrides()
        assert torch.Tensor.softmax in torch.overrides.get_testing_overrides()
        """
    )


def test_a_call_in_progress_ends_well_when_its_handle_is_deactivated() -> None:
    handle = init()

    class Deactivates(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(KeyError):
                handle.deactivate()
            return F.linear(x, x)

    assert Deactivates()(ones()).dtype == torch.float32
