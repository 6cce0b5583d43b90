"""Fixtures for every test: one thread, torch proved pristine afterwards, and the devices that are there."""

from __future__ import annotations

import datetime
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

# Importing Dynamo replaces `torch.manual_seed`; the originals are counted after that.
import torch._dynamo
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
import torch.utils.checkpoint
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# All of the package, whose import adds listeners.
import autoamp.exports
from autoamp.core import activated, api, loader, open_blocks, suspended
from autoamp.torch_private import remove_modes

# Tests that fork would wait without end in the child: it has none of the threads that OpenMP started in this process.
# There is a worker for each core anyway.
torch.set_num_threads(1)

# What its first compilation of a module would replace.
torch._dynamo.mutation_guard.install_generation_tagging_init()

# Half a million objects of torch and of the tests are there by the end of the collection, and stay; tests leave more.
# To look through them takes 0.3 s each time; `frozen_heap` sees to it that nobody does.
gc.disable()

# The same examples in each run; `--hypothesis-profile=thousands` draws many more, others each time.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, report_multiple_bugs=False)
hypothesis.settings.register_profile("thousands", max_examples=2000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("suite")

# Defaults are the same on all machines, here and in child processes: no CPU has all units, and some have none.
os.environ["AUTOAMP_HALF_UNITS"] = "bf16,fp16"

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
HALVES = [torch.float16, torch.bfloat16]

# Everything that autoamp may write to. Object ids do: the originals are builtins and functions of torch, which stay.
WATCHED: tuple[Any, ...] = (
    torch,
    torch.Tensor,
    torch.nn.functional,
    torch.functional,
    torch.linalg,
    torch.special,
    torch.fft,
    torch._VF,
    torch.nn.Module,
    torch.nn.RNNBase,
    torch.nn.modules.activation,
    torch.nn.modules.transformer,
    torch.utils.checkpoint,
    torch.utils.checkpoint.CheckpointFunction,
    torch.autocast,
    torch.autograd.function.BackwardCFunction,
    *(sys.modules[f"torch.nn.parallel{name}"] for name in ("", ".data_parallel", ".parallel_apply")),
)


# Notes that Python leaves on a class whose instance was pickled, and on a module that warned.
PYTHONS_OWN = {"__annotations_cache__", "__slotnames__", "__warningregistry__"}


def fingerprint() -> dict[tuple[int, str], int]:
    """Identify every attribute of torch that a patch could touch."""
    return {
        (id(owner), name): id(value)
        for owner in WATCHED
        for name, value in vars(owner).items()
        if name not in PYTHONS_OWN
    }


_PRISTINE = fingerprint()


def assert_pristine() -> None:
    """Fail when an attribute of torch was added, removed or is another object than at the start."""
    now = fingerprint()
    if now == _PRISTINE:
        return
    names = {id(owner): getattr(owner, "__name__", repr(owner)) for owner in WATCHED}
    changed = [
        f"{names[owner]}.{name}"
        for owner, name in sorted(now.keys() | _PRISTINE.keys())
        # torch imports some of its own modules lazily, which adds to `torch` and takes nothing away.
        if now.get((owner, name)) != _PRISTINE.get((owner, name))
        and not ((owner, name) not in _PRISTINE and isinstance(getattr(torch, name, None), type(torch)))
    ]
    assert not changed, f"torch is not what it was: {changed}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose mark ``client`` names a module that is absent; fail it with ``AUTOAMP_CLIENTS=required``."""
    mark = item.get_closest_marker("client")
    absent = [name for name in (mark.args if mark else ()) if importlib.util.find_spec(name) is None]
    if absent:
        told = f"{', '.join(absent)} not installed; .ci/run says how to install what all tests need"
        if os.environ.get("AUTOAMP_CLIENTS") == "required":
            pytest.fail(f"{told}; AUTOAMP_CLIENTS=required", pytrace=False)
        pytest.skip(told)


def surroundings() -> dict[str, Any]:
    """What a test finds in its process, besides torch, and may not change for the next one."""
    # pytest tells in a variable which test runs; at their import scikit-learn sets variables of OpenMP, and setuptools
    # adds a folder of its own to the path.
    env = {f"${name}": value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "KMP_"))}
    path = [folder for folder in sys.path if "site-packages" not in folder]
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    return {**env, "sys.path": path, "directory": os.getcwd(), "threads": threads, "dtype": dtype}


_KNOWN = surroundings()


@pytest.fixture(autouse=True)
def no_compiled_code() -> None:
    """A program that uses torch.compile is not recorded; the tests before this one do not count."""
    torch._dynamo.eval_frame.cached_backends.clear()


@pytest.fixture(autouse=True)
def same_surroundings() -> Iterator[None]:
    """Prove that a test, and what was imported for it, left the process as it was at first."""
    yield
    now = surroundings()
    changed = {name: now.get(name) for name in now | _KNOWN if now.get(name) != _KNOWN.get(name)}
    # It is told of once.
    _KNOWN.clear()
    _KNOWN.update(now)
    assert not changed, "a test, or what it imports, left this for the next test; let monkeypatch take it back"


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """Collect garbage from now on, and leave out what is there before the first test of a file."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def no_package_lists(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave out the lists of packages that happen to be installed, but for the tests of such lists."""
    with pytest.MonkeyPatch.context() as patched:
        if request.module.__name__.rpartition(".")[2] not in ("test_package_lists", "test_torchvision"):
            patched.setattr(loader, "find_package_lists", lambda path: ())
        yield


@pytest.fixture(autouse=True)
def pristine_torch() -> Iterator[None]:
    """Deactivate what a test left active, forget what it registered, and prove that torch is as it was."""
    torch.manual_seed(0)
    before, listeners = dict(api.handles.registry.rules), (list(activated), list(suspended))
    yield
    handle = autoamp.current_handle()
    if handle is not None:
        handle.deactivate()
    api.set_handle(None)
    api.handles.registry.rules = before
    left = (list(activated), list(suspended))
    activated[:], suspended[:] = listeners
    assert left == listeners, "a listener is left, and hears of the next test's handles"
    hooks = torch.nn.modules.module
    assert not {**hooks._global_forward_pre_hooks, **hooks._global_forward_hooks}, "a hook on all modules is left"
    # `torch.optim.optimizer` is not to be had as an attribute.
    steps = sys.modules["torch.optim.optimizer"]
    held = steps._global_optimizer_pre_hooks, steps._global_optimizer_post_hooks
    assert held == ({}, {}), "a hook on all optimizers is left"
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    remove_modes(*modes)
    assert not modes, "a mode is left, which intercepts the calls of the next test"
    assert_pristine()
    assert open_blocks.count == 0
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device type that this machine has."""
    return str(request.param)


@pytest.fixture(params=HALVES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def half(request: pytest.FixtureRequest) -> torch.dtype:
    """Each half dtype."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path, whose modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """Make a process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fake_ranks() -> Iterator[Callable[[int], None]]:
    """Return a function that makes this process rank 0 of so many, without a group for 1. Collectives do nothing."""

    def make(world_size: int) -> None:
        if world_size > 1:
            store = dist.HashStore()
            # How long a test waits for another rank, which never answers.
            store.set_timeout(datetime.timedelta(seconds=0.1))
            dist.init_process_group("fake", rank=0, world_size=world_size, store=store)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def collected() -> Any:
    """Return a function that collects garbage, for tests that count what is alive."""

    def collect() -> None:
        for _ in range(3):
            gc.collect()

    return collect
