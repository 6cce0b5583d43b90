"""NVRTC compiles the CUDA kernels, which needs no GPU; nothing is run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from autoamp_kernels.cuda import Images
from autoamp_kernels.errors import KernelError
from autoamp_kernels.nvrtc import Compiler, compiler

from tests.kernels.conftest import KERNELS

UNITS = {
    "AK_MAKE_adam(BF16,F32,BF16,bfb)": [b"ak_adam_bfb", b"ak_advance"],
    "AK_MAKE_scale(F16,Nothing,hn)": [b"ak_scale_hn", b"ak_scale_norms", b"ak_scale_total"],
    "AK_MAKE_lamb(F32,F32,F16,ffh) AK_MAKE_lamb_last(F32,F16,fh)": [b"ak_lamb_ffh", b"ak_lamb_last_fh"],
    "AK_MAKE_norm(BF16,F32,bf)": [b"ak_norm_bf", b"ak_norm_columns_bf", b"ak_norm_sums"],
    "AK_MAKE_statistics(F16,h)": [b"ak_statistics_h", b"ak_statistics_side_h", b"ak_statistics_sums"],
    "AK_MAKE_merge(,)": [b"ak_merge_parts"],
}


@pytest.fixture(scope="module")
def nvrtc() -> Compiler:
    try:
        return compiler()
    except KernelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def source() -> str:
    program = "import sys, pathlib; sys.path.insert(0, sys.argv[1]); from setup import *; " + (
        "sys.stdout.write(one_source(SOURCES / 'cuda_kernels.cu', set()))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(KERNELS)], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("unit", UNITS)
def test_each_unit_has_its_kernels_and_no_others(nvrtc: Compiler, source: str, unit: str) -> None:
    cubin = nvrtc.compile(source, "kernels.cu", 90, [f"-DAK_ONE={unit}"])
    assert cubin.startswith(b"\x7fELF")
    assert all(b".text." + name in cubin for name in UNITS[unit])
    assert b".text.ak_sgd_" not in cubin


def test_the_oldest_card_gets_code_and_an_unknown_new_one_gets_ptx(nvrtc: Compiler, source: str) -> None:
    unit = "-DAK_ONE=AK_MAKE_sgd(F32,F32,Nothing,ffn)"
    assert nvrtc.compile(source, "kernels.cu", min(nvrtc.capabilities), [unit]).startswith(b"\x7fELF")
    ptx = nvrtc.compile(source, "kernels.cu", 999, [unit])
    assert b".target sm_" in ptx
    assert b".entry ak_sgd_ffn" in ptx
    with pytest.raises(KernelError, match=r"no code for compute capability 3\.0"):
        nvrtc.compile(source, "kernels.cu", 30)


def test_an_error_carries_the_compilers_words(nvrtc: Compiler) -> None:
    with pytest.raises(KernelError, match=r"cannot compile wrong\.cu:(.|\n)*expected"):
        nvrtc.compile("this is no C++", "wrong.cu", 90)


def test_a_file_that_is_no_compiler_is_told() -> None:
    with pytest.raises(KernelError, match=r"libc\.so\.6 cannot be loaded"):
        Compiler("libc.so.6")


def test_a_missing_source_is_told() -> None:
    with pytest.raises(KernelError, match=r"kernels\.cu is missing"):
        _ = Images(KERNELS / "none").source
