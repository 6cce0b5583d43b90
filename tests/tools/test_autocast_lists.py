"""The shipped lists beside torch.autocast of the installed torch, for each device type and half dtype."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autoamp
from autoamp.core import CastPolicy, CastTable, load_table, shipped_table
from tests.tools.list_checks import autocast_differences, autocast_policies, autocast_registrations

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SETS = {"fp16": "default", "bf16": "bf16"}
ROUNDING = {"fp16": 2**-11, "bf16": 2**-8}
NARROWER: list[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("narrower_than_autocast.toml").read_text(encoding="utf-8")
)["op"]


def narrower_ops(half: str) -> dict[str, float]:
    """The ops that may be narrower on a CPU, with their error."""
    return {op: entry["error"] for entry in NARROWER if entry.get("half", half) == half for op in entry["op"]}


# Operators under the name of the function that calls them. The null device compares the layers of cuDNN.
UNDER_ANOTHER_NAME = re.compile(
    "_?upsample_|nll_loss2d|cross_entropy_loss|multilabel_margin_loss_forward|_thnn_fused_|re(flection|plication)_pad|"
    "_cudnn_rnn"
)


@pytest.mark.parametrize(("device_type", "key"), [("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")])
def test_no_operator_of_autocasts_lists_is_left_out(device_type: str, key: str) -> None:
    registered = {name.removeprefix("aten::").partition(".")[0] for name in autocast_registrations(key)}
    compared = {name.removeprefix("torch.").replace(".", "_") for name in autocast_policies(device_type)}
    assert [name for name in sorted(registered - compared) if not UNDER_ANOTHER_NAME.match(name)] == []
    assert "multilabel_margin_loss" in compared or device_type != "cpu"


@pytest.mark.parametrize("half", SETS)
@pytest.mark.parametrize("device_type", ["cuda", "cpu", "xpu", "mps"])
def test_each_op_of_autocasts_lists_is_as_wide_here(device_type: str, half: str) -> None:
    assert len(autocast_policies(device_type)) > 80
    found = autocast_differences(shipped_table(SETS[half], device_type), device_type) or ()
    narrower = {one.op for one in found if one.is_narrower and one.in_torch is not CastPolicy.NONE}
    assert narrower == (set(narrower_ops(half)) if device_type == "cpu" else set())


def test_default_has_each_op_of_autocasts_lists_for_cuda_under_its_policy() -> None:
    found = autocast_differences(shipped_table("default", "cuda"), "cuda") or ()
    # An outer product, which gains nothing from half precision.
    assert [one.op for one in found if one.in_torch is not CastPolicy.NONE] == ["addr"]


VOLUME = torch.randn(1, 2, 4, 8, 8)
PLANE = torch.randn(1, 2, 8, 8)


def half_of(x: torch.Tensor, dims: int) -> torch.Tensor:
    """The samples of a fractional pool that are all 0.5."""
    return torch.full((1, 2, dims), 0.5, dtype=x.dtype)


CALLS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), VOLUME),
    "cat": (lambda x: torch.cat([x, x.float()]), PLANE),
    "fake_quantize_per_tensor_affine": (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -128, 127), PLANE),
    "fractional_max_pool2d": (lambda x: F.fractional_max_pool2d(x, 2, 3, _random_samples=half_of(x, 2)), PLANE),
    "fractional_max_pool3d": (lambda x: F.fractional_max_pool3d(x, 2, 2, _random_samples=half_of(x, 3)), VOLUME),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), VOLUME),
    "max_unpool2d": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), PLANE),
    "max_unpool3d": (lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), VOLUME),
    "pad": (lambda x: torch.cat([F.pad(x, (1, 1, 1, 1), mode=mode) for mode in ("reflect", "replicate")]), PLANE),
    "stack": (lambda x: torch.stack([x, x.float()]), PLANE),
    "view_as_complex": (lambda x: torch.view_as_real(torch.view_as_complex(x)), torch.randn(5, 2)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize(("half", "op"), [(half, op) for half in HALVES for op in narrower_ops(half)])
def test_a_narrower_op_is_off_by_no_more_than_its_entry_says(half: str, op: str) -> None:
    call, values = CALLS[op]
    values = values.to(HALVES[half])
    reference = call(values.float())
    autoamp.init(device_type="cpu", dtype=HALVES[half])
    error = (call(values).float() - reference).abs()
    assert (error <= narrower_ops(half)[op] * ROUNDING[half] * reference.abs()).all()
    assert bool(error.any()) is (narrower_ops(half)[op] > 0)


@pytest.mark.parametrize("half", HALVES)
def test_grid_samples_of_half_coordinates_are_those_of_fp32_on_a_cpu(half: str) -> None:
    image, grid = (values.to(HALVES[half]) for values in (torch.randn(1, 2, 64, 64), torch.rand(1, 9, 9, 2) * 2 - 1))
    reference = F.grid_sample(image.float(), grid.float(), align_corners=False)
    autoamp.init(device_type="cpu", dtype=HALVES[half])
    assert torch.equal(F.grid_sample(image, grid, align_corners=False), reference)


SUMS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 2), torch.rand(2, 4, 16, 16, 16)),
    "fold": (lambda x: F.fold(F.unfold(x, 8, stride=2), (64, 64), 8, stride=2), torch.rand(2, 4, 64, 64)),
    "segment_reduce": (
        lambda x: torch.segment_reduce(x, "mean", lengths=torch.tensor([1024, 1024])), torch.rand(2048, 4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("op", SUMS)
def test_what_the_cpu_sums_in_half_is_fp32(op: str, half: str) -> None:
    call, values = SUMS[op]
    values = values.to(HALVES[half])
    reference = call(values.float())
    autoamp.init(device_type="cpu", dtype=HALVES[half])
    assert torch.equal(call(values), reference)


def test_an_op_that_torch_lists_and_no_list_here_is_told() -> None:
    found = {one.op: one for one in autocast_differences(CastTable(), "cuda") or ()}
    assert (found["mm"].in_torch, found["mm"].here) == (CastPolicy.FP16, CastPolicy.NONE)
    assert [found[op].is_narrower for op in ("mm", "softmax")] == [False, True]
    assert autocast_differences(CastTable(), "meta") is None


def test_dotted_rules_are_compared_as_the_function_that_they_name() -> None:
    narrower = ["torch.softmax", "torch.Tensor.softmax", "torch.nn.functional.softmax", "torch.nn.functional.mse_loss"]
    wider = ["torch.functional.einsum", "torch.Tensor.mm"]
    table = load_table({"extends": ["default"], "fp16": narrower, "fp32": wider}, device_type="cuda", environ={})
    found = {one.op: one for one in autocast_differences(table, "cuda") or ()}
    for ops, in_torch in ((narrower, CastPolicy.FP32), (wider, CastPolicy.FP16)):
        assert [found[op].in_torch for op in ops] == [in_torch] * len(ops)
        assert [found[op].is_narrower for op in ops] == [ops is narrower] * len(ops)
    # Another function than `torch.mm`, which autocast does not list.
    assert found["torch.sparse.mm"].in_torch is CastPolicy.NONE


def test_asking_leaves_autocast_as_it_was() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        autocast_policies("cpu")
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (True, torch.float16)
    assert not torch.is_autocast_enabled("cuda")
