"""What the sets in `lists/` say, beside torch's own autocast lists and what its kernels do."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import autoamp
from autoamp.core import shipped_sets, shipped_table
from tests.core.rules._shared import load, policies, shipped_data, shipped_file
from tests.tools.list_checks import autocast_policies


def test_the_shipped_sets_are_these() -> None:
    assert shipped_sets() == ("apex", "bf16", "default", "o2")


@pytest.mark.parametrize("name", ["apex", "bf16"])
def test_a_none_of_a_shipped_set_takes_an_inherited_rule_away(name: str) -> None:
    inherited = policies(load("default"))
    for target in shipped_data(name).get("none", []):
        assert inherited[target] == "fp32"


# Rules of the bf16 set: on a CPU, and on whatever else casts.
BY_DEVICE = [
    (("group_norm", "layer_norm", "native_group_norm", "native_layer_norm", "rms_norm"), "none", "fp32"),
    (("rrelu",), "none", "none"),
    (("acos", "exp", "softmax", "sum", "log_softmax", "cross_entropy", "trace"), "fp32", "fp32"),
]


@pytest.mark.parametrize(("targets", "on_cpu", "elsewhere"), BY_DEVICE)
def test_the_bf16_set_goes_with_the_device(targets: tuple[str, ...], on_cpu: str, elsewhere: str) -> None:
    for device_type, policy in (("cpu", on_cpu), ("cuda", elsewhere), ("xpu", elsewhere)):
        covered = policies(load("bf16", device_type=device_type))
        assert {target: covered[target] for target in targets} == dict.fromkeys(targets, policy)
        assert policies(shipped_table("bf16", device_type)) == covered


def test_rrelu_is_fp32_only_where_fp16_has_no_kernel() -> None:
    assert policies(load("default", device_type="cpu"))["rrelu"] == "fp32"
    assert "rrelu" not in policies(load("default", device_type="cuda"))


@pytest.mark.parametrize("inplace", [False, True])
def test_rrelu_trains_in_fp16_on_a_cpu(inplace: bool) -> None:
    autoamp.init(device_type="cpu", dtype=torch.float16)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.RReLU(inplace=inplace), torch.nn.Linear(4, 1))
    model(torch.randn(3, 4)).float().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


_WIDE = torch.linspace(-9.0, 9.0, 64 * 515).reshape(64, 515).bfloat16()

_WEIGHT = torch.linspace(-2.0, 2.0, 515).bfloat16()

STAY_IN_BF16: dict[str, Callable[..., torch.Tensor]] = {
    "group_norm": lambda a, w: F.group_norm(a[None], 8, w[:64], w[64:128]),
    "layer_norm": lambda a, w: F.layer_norm(a, (515,), w, w),
    "native_group_norm": lambda a, w: torch.native_group_norm(a[None], w[:64], w[64:128], 1, 64, 515, 8, 1e-5)[0],
    "native_layer_norm": lambda a, w: torch.native_layer_norm(a, (515,), w, w, 1e-5)[0],
    "rms_norm": lambda a, w: F.rms_norm(a, (515,), w, 1e-6),
    "rrelu": lambda a, w: F.rrelu(a),
}


def test_every_op_that_stays_in_bf16_is_measured() -> None:
    assert sorted(STAY_IN_BF16) == shipped_data("bf16")["none"]


@pytest.mark.parametrize("target", STAY_IN_BF16)
def test_an_op_that_stays_in_bf16_rounds_once(target: str) -> None:
    call = STAY_IN_BF16[target]
    got = call(_WIDE, _WEIGHT)
    reference = call(_WIDE.float(), _WEIGHT.float())
    assert got.dtype == torch.bfloat16
    # The kernels of the two dtypes may differ by an fp32 rounding, which flips a bf16 rounding now and then.
    assert got.eq(reference.bfloat16()).float().mean() > 0.999
    torch.testing.assert_close(got.float(), reference, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("name", shipped_sets())
def test_every_entry_of_a_shipped_set_has_its_reason(name: str) -> None:
    text = shipped_file(f"{name}.toml").read_text(encoding="utf-8")
    # Under a table the reason is the key, or a limit needs none.
    text = re.split(r"^\[", text, flags=re.MULTILINE)[0]
    entries = re.findall(r'^    "([\w.]+)",(?:  # (.+))?$', text, re.MULTILINE)
    assert entries
    assert [entry for entry, reason in entries if not reason] == []
    from_torch = {entry.rpartition(".")[2] for entry, reason in entries if reason.startswith("torch: ")}
    assert from_torch <= {op.rpartition(".")[2] for op in autocast_policies("cuda")}
    assert bool(from_torch) is (name == "default")


APEX = {
    "fp16": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm addmv addr "
    "matmul mm mv addbmm baddbmm bmm linear __matmul__",
    "fp32": "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow __pow__ __rpow__ cumprod "
    "cumsum dist norm prod std sum var renorm softmax log_softmax softmin softplus gelu interpolate grid_sample "
    "layer_norm group_norm local_response_norm normalize cosine_similarity poisson_nll_loss cross_entropy "
    "cosine_embedding_loss hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss nll_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss smooth_l1_loss "
    "binary_cross_entropy_with_logits torch.Tensor.cpu",
    "promote": "addcdiv addcmul atan2 cross bilinear dot cat stack",
    "banned": "binary_cross_entropy",
}


def test_apex_has_its_own_policies() -> None:
    table = load("apex")
    found = policies(table)
    for policy, names in APEX.items():
        assert {name: found.get(name) for name in names.split()} == dict.fromkeys(names.split(), policy)
    # What apex.toml leaves to torch's own promotion, for tensors of one dimension or more.
    half, single = torch.ones(2, dtype=torch.float16), torch.ones(2)
    for name in ("add", "sub", "mul", "div"):
        assert found[name] == "none"
        assert getattr(torch, name)(half, single).dtype == torch.float32
    assert torch.add(half, torch.tensor(1.0)).dtype == torch.float16
    assert table.sources == ("lists/default.toml", "lists/apex.toml")


@pytest.mark.parametrize("name", ["addcdiv", "addcmul"])
def test_what_promotes_by_itself_in_place_is_not_patched(name: str) -> None:
    """The values are those of the function in the widest dtype, which is patched."""
    in_place = getattr(torch.Tensor, f"{name}_")
    autoamp.init(device_type="cpu", dtype=torch.float16)
    assert getattr(torch.Tensor, f"{name}_") is in_place
    for own, *others in itertools.product((torch.float16, torch.bfloat16, torch.float32), repeat=3):
        written, *given = (torch.rand(7).add(0.5).to(dtype) for dtype in (own, *others))
        expected = getattr(torch, name)(written, *given, value=0.3).to(own)
        assert in_place(written, *given, value=0.3) is written
        assert written.dtype is own
        assert torch.equal(written, expected)
