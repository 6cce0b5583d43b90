"""The launcher of the CUDA kernels, on an emulated device: tables, grids, contexts, failures and doors."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import autoamp_kernels
import pytest
import torch
from autoamp_kernels import cuda
from autoamp_kernels.abi import BF16, F32, NO_DTYPE, AdamArgs, MergeArgs, NormArgs, ScaleArgs
from autoamp_kernels.cuda import Images, Modules, Packaged, unit_of, ways
from autoamp_kernels.errors import KernelError
from autoamp_kernels.nvrtc import Compiler

from tests.kernels.conftest import KERNELS, EmulatedCuda, emulated_driver

PART = 8192
NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}


def lists(sizes: list[int], dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], ...]:
    generator = torch.Generator().manual_seed(0)
    made = tuple([torch.rand(size, generator=generator) for size in sizes] for _ in range(4))
    return made[0], [one.to(dtype) for one in made[1]], *made[2:]


def test_one_launch_for_400_tensors_on_the_callers_stream(emulated: EmulatedCuda) -> None:
    sizes = [PART + 1, 0, 1] + [5] * 397
    autoamp_kernels.adam_(*lists(sizes, torch.bfloat16), **NUMBERS, step=1)
    assert emulated.launches() == [("ak_adam_bfn", 2 + 0 + 1 + 397, 512, 7)]


@pytest.mark.emulated
def test_more_tensors_than_a_launch_takes(emulated: EmulatedCuda) -> None:
    sizes = [1 + index % 3 for index in range(2000)]
    sizes[700] = 3 * PART
    ins = [torch.full((size,), float(index % 7)) for index, size in enumerate(sizes)]
    norms, total = torch.empty(len(ins)), torch.empty(())
    autoamp_kernels.scale_(ins, norms=norms, total=total)
    exact = torch.stack([one.double().norm() for one in ins])
    torch.testing.assert_close(norms, exact.float())
    torch.testing.assert_close(total, exact.norm().float())
    launched = emulated.launches()
    assert [one[0] for one in launched] == ["ak_scale_fn", "ak_scale_norms"] * 2 + ["ak_scale_total"]
    assert sum(blocks for name, blocks, *_ in launched if name == "ak_scale_fn") == 2000 + 2
    assert sum(blocks for name, blocks, *_ in launched if name == "ak_scale_norms") == 2000


def test_steps_of_more_tensors_than_a_launch_takes(emulated: EmulatedCuda) -> None:
    given = lists([2] * 3000)
    before = [one.clone() for one in given[0]]
    steps = [torch.zeros(()) for _ in given[0]]
    autoamp_kernels.adam_(*given, **NUMBERS, step=steps, advance=True)
    assert all(step == 1 for step in steps)
    assert not any(map(torch.equal, given[0], before))
    names = [name for name, *_ in emulated.launches()]
    assert names == ["ak_advance"] * 2 + ["ak_adam_ffn"] * 7


def test_empty_tensors_alone_start_nothing(emulated: EmulatedCuda) -> None:
    autoamp_kernels.adam_(*lists([0, 0]), **NUMBERS, step=1)
    assert emulated.launches() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_the_cpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, dtype: torch.dtype) -> None:
    sizes = [1, 7, 0, PART, PART + 4, 3 * PART + 3]

    def stepped() -> list[torch.Tensor]:
        given = lists(sizes, dtype)
        halves = [torch.empty(size, dtype=torch.bfloat16) for size in sizes]
        for step in (1, 2):
            autoamp_kernels.adam_(*given, **NUMBERS, step=step, weight_decay=0.1, halves=halves, inv_scale=0.5)
        return [*given[0], *given[2], *given[3], *halves]

    on_cpu = stepped()
    emulated: EmulatedCuda = request.getfixturevalue("emulated")
    assert all(map(torch.equal, stepped(), on_cpu))
    assert emulated.launches()


def test_a_failing_launch_names_kernel_and_cause(emulated: EmulatedCuda) -> None:
    emulated.fail("cuLaunchKernel", 700)
    with pytest.raises(
        KernelError, match=r"kernel adam: cuLaunchKernel of ak_adam_ffn failed: CUDA_ERROR_ILL.*\(700\): "
    ):
        autoamp_kernels.adam_(*lists([3]), **NUMBERS, step=1)
    emulated.fail("cuModuleGetFunction", 3)
    with pytest.raises(
        KernelError, match=r"kernel sgd: cuModuleGetFunction of ak_sgd_ffn failed: error \(3\): unknown"
    ):
        autoamp_kernels.sgd_(*lists([3])[:2], lr=0.1)


def test_without_a_module_there_is_no_device() -> None:
    from autoamp_kernels.abi import ABI, CUDA, Head
    from autoamp_kernels.library import library

    head = Head(size=ctypes.sizeof(ScaleArgs), version=ABI, device=CUDA, threads=1)
    with pytest.raises(KernelError, match="no kernels for the device"):
        library().call("scale", ScaleArgs(head=head))


def test_units_are_what_the_source_makes() -> None:
    adam = AdamArgs(grad_dtype=BF16, param_dtype=F32, half_dtype=NO_DTYPE)
    assert unit_of("adam", adam) == "AK_MAKE_adam(BF16,F32,Nothing,bfn)"
    assert unit_of("scale", ScaleArgs(in_dtype=F32, out_dtype=BF16)) == "AK_MAKE_scale(F32,BF16,fb)"
    assert unit_of("norm", NormArgs(grad_dtype=BF16, in_dtype=F32)) == "AK_MAKE_norm(BF16,F32,bf)"
    assert unit_of("merge", MergeArgs()) == "AK_MAKE_merge(,)"


# -- doors --


def image(folder: Path, contents: bytes = b"image", **capabilities: list[int]) -> Packaged:
    (folder / "kernels.fatbin").write_bytes(contents)
    (folder / "kernels.json").write_text(json.dumps(capabilities))
    return Packaged(folder)


def test_code_of_an_older_minor_version_serves(tmp_path: Path) -> None:
    packaged = image(tmp_path, code=[75, 80, 90], ptx=[120])
    answers = {75: True, 80: True, 86: True, 70: False, 90: True, 100: False, 120: True, 121: True}
    assert {capability: packaged.covers(capability) for capability in answers} == answers
    assert not Packaged(tmp_path / "none").covers(90)


class CompilerOfTests(Compiler):
    """Stands for NVRTC."""

    def __init__(self, version: tuple[int, int] = (13, 0), capabilities: tuple[int, ...] = (75, 90)) -> None:
        self.version, self.capabilities, self.compiled = version, capabilities, 0

    def compile(self, source: str, name: str, capability: int, options: Any = ()) -> bytes:
        self.compiled += 1
        return f"{capability} {options[0]} {self.compiled}".encode()


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Images, CompilerOfTests]:
    monkeypatch.setenv("AUTOAMP_KERNELS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "kernels.cu").write_text("source")
    compiler = CompilerOfTests()
    return Images(tmp_path, lambda: compiler), compiler


def reasons(emulated: EmulatedCuda, packaged: Packaged, images: Images) -> list[tuple[bool, str]]:
    return list(ways(emulated.library, packaged, images, str(emulated_driver())).values())


def test_closed_doors_say_why(
    emulated: EmulatedCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, images: tuple[Images, CompilerOfTests]
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("AUTOAMP_KERNELS_CACHE", str(tmp_path))
    packaged = image(tmp_path, code=[75, 90], ptx=[])
    assert [is_open for is_open, _ in reasons(emulated, packaged, images[0])] == [True, True]
    emulated.device(capability=100)
    nvcc, nvrtc = reasons(emulated, packaged, images[0])
    assert nvcc == (False, "no code for this card: it has compute capability 10.0, the package 7.5, 9.0; use NVRTC")
    assert nvrtc[0]
    emulated.device(capability=61)
    assert "NVRTC 13.0 knows only later ones" in reasons(emulated, packaged, images[0])[1][1]
    emulated.device(version=12000)
    assert all("too old: it speaks CUDA 12.0" in why and not ok for ok, why in reasons(emulated, packaged, images[0]))
    emulated.device(count=0)
    assert all("no GPU" in why and not ok for ok, why in reasons(emulated, packaged, images[0]))
    emulated.device()
    emulated.fail("cuInit", 100)
    assert all("no GPU: cuInit failed" in why for _, why in reasons(emulated, packaged, images[0]))
    emulated.fail("")
    nothing = tmp_path / "nothing"
    assert all(why.startswith("not installed") for _, why in reasons(emulated, Packaged(nothing), Images(nothing)))
    missing = ways(emulated.library, driver="libcuda.so.none")
    assert all(why.startswith("no driver: libcuda.so.none") and not ok for ok, why in missing.values())
    not_a_driver = ways(emulated.library, driver="libc.so.6")
    assert all("libc.so.6 has no function cuInit" in why for _, why in not_a_driver.values())


def modules_of(emulated: EmulatedCuda, packaged: Packaged, images: Images) -> Modules:
    return Modules(emulated.library, packaged, images, str(emulated_driver()))


def test_nvccs_image_is_taken_first_and_nvrtcs_where_the_driver_refuses(
    emulated: EmulatedCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, images: tuple[Images, CompilerOfTests]
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("AUTOAMP_KERNELS_CACHE", str(tmp_path / "cache"))
    unit = "AK_MAKE_adam(BF16,F32,BF16,bfb)"
    modules = modules_of(emulated, image(tmp_path, code=[90], ptx=[]), images[0])
    assert modules.opened(0, unit) is None
    assert modules.open(0, unit) == modules.open(0, "another") == modules.opened(0, unit)
    assert images[1].compiled == 0
    modules = modules_of(emulated, image(tmp_path, b"refused", code=[90], ptx=[]), images[0])
    assert modules.open(0, unit) != modules.open(0, "another")
    assert images[1].compiled == 2
    again = modules_of(emulated, Packaged(tmp_path / "none"), images[0])
    assert again.open(0, unit)
    assert images[1].compiled == 2


def test_an_image_on_disk_that_the_driver_refuses_is_made_again(
    emulated: EmulatedCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, images: tuple[Images, CompilerOfTests]
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("AUTOAMP_KERNELS_CACHE", str(tmp_path / "cache"))
    from autoamp_kernels import cache

    cache.cached("sm_90", images[0].key("unit", 90, 13000), lambda: b"refused")
    modules = modules_of(emulated, Packaged(tmp_path / "none"), images[0])
    assert modules.open(0, "unit")
    assert images[1].compiled == 1
    emulated.fail("cuModuleLoadData", 209)
    with pytest.raises(KernelError, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
        modules.open(0, "other")


# -- what nvcc makes --

NVCC = shutil.which("nvcc")


@pytest.mark.emulated
@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_registers_and_spills(tmp_path: Path) -> None:
    """The figures of compute capability 9.0; `kernels/resources.py` says how to write them anew."""
    written = Path(__file__).with_name("resources.json")
    environment = {**os.environ, "AUTOAMP_KERNELS_CUDA": "90"}
    command = [sys.executable, str(KERNELS / "resources.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    measured, expected = json.loads(done.stdout), json.loads(written.read_text())
    assert all(one["spills"] == 0 and one["stack"] == 0 for one in measured.values())
    assert measured.keys() == expected.keys()
    # 64 registers let two blocks of 512 threads run on a multiprocessor at once.
    assert all(one["registers"] <= 64 for one in measured.values())
    more = {name: one for name, one in measured.items() if one["registers"] > expected[name]["registers"] + 4}
    assert not more, f"more registers than resources.json says: {more}; if that is meant, write it anew"


def test_the_doors_can_be_asked_without_a_driver() -> None:
    assert cuda.DRIVER == "libcuda.so.1"
    assert {door.way for door in autoamp_kernels.doors()} == {"cpu", "nvcc", "nvrtc"}
