"""The rules room: the format, its errors, discovery, merging, and what the shipped sets say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import autoamp
from autoamp.errors import ListFileError
from autoamp.rules import loader
from autoamp.rules.loader import check_bare_names, load_table, shipped_sets, shipped_table
from autoamp.rules.table import CastPolicy, CastRule, CastTable, ModulePrecision, ModuleRule, Origin, admits
from autoamp.rules.toml_lines import TomlLines

SPACES = (torch, torch.Tensor, F, torch.linalg, torch.special, torch.fft, torch._VF)
POLICY_KEYS = ("fp16", "fp32", "promote", "none")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to start from, which is the current one too."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(lists: object = None, environ: Mapping[str, str] | None = None, **options: Any) -> CastTable:
    return load_table(lists, environ=environ or {}, **options)


def policies(table: CastTable) -> dict[str, str]:
    return {rule.target: rule.policy.value for rule in table.rules}


def write(path: Path, text: str, *, schema: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("schema = 1\n" * schema + text, encoding="utf-8")
    return path


# --- the shipped sets ---------------------------------------------------------------------------------------------


def shipped_data(name: str) -> dict[str, Any]:
    return tomllib.loads((loader._shipped_folder() / f"{name}.toml").read_text(encoding="utf-8"))


def test_the_shipped_sets_are_these() -> None:
    assert shipped_sets() == ("apex", "bf16", "default")


@pytest.mark.parametrize("name", shipped_sets())
def test_arrays_of_shipped_sets_are_sorted(name: str) -> None:
    data = shipped_data(name)
    for key in ("banned", "devices", "modules", "none", "versions"):
        assert list(data.get(key, {})) == sorted(data.get(key, {}))
    reasons = data["none"] if isinstance(data.get("none"), dict) else {}
    arrays = {**reasons, **{key: data[key] for key in (*POLICY_KEYS, "extends") if isinstance(data.get(key), list)}}
    assert arrays
    for key, entries in arrays.items():
        assert entries == sorted(entries), key


@pytest.mark.parametrize("name", shipped_sets())
def test_every_target_of_shipped_sets_is_a_function_of_this_torch(name: str) -> None:
    for rule in load(name).rules:
        if rule.policy is CastPolicy.NONE or not admits(rule.versions, torch.__version__):
            continue
        if rule.bare:
            found = [getattr(space, rule.target) for space in SPACES if hasattr(space, rule.target)]
        else:
            module, _, last = rule.target.rpartition(".")
            found = [getattr(eval(module, {"torch": torch}), last)]
        assert found, rule
        assert all(callable(function) for function in found), f"{rule} also names something that is no function"


@pytest.mark.parametrize("name", ["apex", "bf16"])
def test_a_none_of_a_shipped_set_takes_an_inherited_rule_away(name: str) -> None:
    inherited = policies(load("default"))
    for target in shipped_data(name).get("none", []):
        assert inherited[target] == "fp32"


def header_lists() -> dict[str, set[str]]:
    """The names of torch's CUDA autocast lists, by policy, from the header that torch installs."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this torch has no headers")
    text = header.read_text(encoding="utf-8")
    found: dict[str, set[str]] = {"fp16": set(), "fp32": set(), "promote": set()}
    macros = {
        "LOWER_PRECISION_FP": "fp16",
        "FP32": "fp32",
        "FP32_SET_OPT_DTYPE": "fp32",
        "DIFFERENT_REDISPATCH_SIGNATURE": "fp32",
        "PROMOTE": "promote",
    }
    for macro, policy in macros.items():
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", text)
        assert body, macro
        found[policy] |= set(re.findall(r"_\((?:ADD_NS\()?([a-z_0-9]+)", body[1]))
    return found


# Ops that Python cannot name: a listed function hides them, or nothing in Python calls them.
HIDDEN = {
    "nll_loss2d": "nll_loss", "_thnn_fused_lstm_cell": "lstm", "_thnn_fused_gru_cell": "gru", "_cudnn_rnn": "lstm",
}  # fmt: skip


def python_name(op: str) -> str:
    if "upsample_" in op:
        return "interpolate"
    return HIDDEN.get(op, op.removeprefix("linalg_"))


def is_covered(op: str, covered: Mapping[str, str]) -> bool:
    return python_name(op).removeprefix("fft_") in covered or op.replace("linalg_", "torch.linalg.", 1) in covered


def test_default_gives_each_op_of_torchs_cuda_lists_its_policy() -> None:
    table = load("default")
    lists = header_lists()
    assert len(lists["fp16"]) > 30
    assert len(lists["fp32"]) > 60
    for policy, ops in lists.items():
        for op in ops:
            rule = table.policy_of(python_name(op))
            assert rule is not None, op
            assert rule.policy.value == policy, op


def dispatcher_list(key: str) -> set[str]:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::").split(".")[0] for name in registered}


def test_default_covers_all_that_the_dispatcher_casts_on_cuda() -> None:
    ops = dispatcher_list("AutocastCUDA")
    assert len(ops) > 100
    covered = policies(load("default"))
    assert {op for op in ops if not is_covered(op, covered)} == set()
    assert covered["binary_cross_entropy"] == "banned"


# What CPU autocast casts and the bf16 set leaves alone: it has bf16 kernels now, or only torch itself calls it.
LEFT_BY_BF16 = {
    "_grid_sampler_2d_cpu_fallback", "_lu_with_info", "adaptive_avg_pool3d", "adaptive_max_pool3d",
    "cross_entropy_loss", "fake_quantize_per_tensor_affine", "fft_fft", "fractional_max_pool2d",
    "fractional_max_pool3d", "grid_sampler_2d", "grid_sampler_3d", "max_pool3d", "max_unpool2d", "max_unpool3d",
    "mkldnn_rnn_layer", "multilabel_margin_loss_forward", "reflection_pad1d", "reflection_pad2d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "linalg_cond", "linalg_eig", "linalg_lstsq",
    "linalg_matrix_rank", "linalg_solve",
}  # fmt: skip


def test_bf16_covers_what_the_dispatcher_casts_on_the_cpu() -> None:
    covered = policies(load("bf16"))
    ops = dispatcher_list("AutocastCPU")
    assert len(ops) > 100
    assert {op for op in ops if not is_covered(op, covered)} <= LEFT_BY_BF16
    for target in ("fft.fft", "linalg.cond", "linalg.eig", "linalg.lstsq", "linalg.matrix_rank", "linalg.solve"):
        assert covered[f"torch.{target}"] == "fp32"
    assert covered["cross_entropy"] == covered["binary_cross_entropy"] == "fp32"
    assert covered["cat"] == covered["stack"] == covered["index_copy"] == "promote"


# Rules of the bf16 set: on a CPU, and on whatever else casts.
BY_DEVICE = [
    (("group_norm", "layer_norm", "native_group_norm", "native_layer_norm", "rms_norm"), "none", "fp32"),
    (("nansum", "sum", "sum_to_size"), "none", "fp32"),
    (("cat", "stack"), "promote", "none"),
    (("multilabel_soft_margin_loss",), "fp32", "none"),
    (("acos", "exp", "softmax"), "none", "none"),
    (("log_softmax", "cross_entropy", "trace"), "fp32", "fp32"),
]


@pytest.mark.parametrize(("targets", "on_cpu", "elsewhere"), BY_DEVICE)
def test_the_bf16_set_goes_with_the_device(targets: tuple[str, ...], on_cpu: str, elsewhere: str) -> None:
    for device_type, policy in (("cpu", on_cpu), ("cuda", elsewhere), ("xpu", elsewhere)):
        covered = policies(load("bf16", device_type=device_type))
        assert {target: covered[target] for target in targets} == dict.fromkeys(targets, policy)
        assert policies(shipped_table("bf16", device_type)) == covered


_UNIT = torch.linspace(0.02, 0.98, 64 * 515).reshape(64, 515).bfloat16()
_WIDE = torch.linspace(-9.0, 9.0, 64 * 515).reshape(64, 515).bfloat16()
_WEIGHT = torch.linspace(-2.0, 2.0, 515).bfloat16()

STAY_IN_BF16: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]] = {
    "acos": (torch.acos, _UNIT),
    "arccos": (torch.arccos, _UNIT),
    "arcsin": (torch.arcsin, _UNIT),
    "asin": (torch.asin, _UNIT),
    "cosh": (torch.cosh, _WIDE),
    "erfinv": (torch.erfinv, _UNIT),
    "exp": (torch.exp, _WIDE),
    "exp2": (torch.exp2, _WIDE),
    "expm1": (torch.expm1, _WIDE),
    "group_norm": (lambda a, w: F.group_norm(a[None], 8, w[:64], w[64:128]), _WIDE),
    "layer_norm": (lambda a, w: F.layer_norm(a, (515,), w, w), _WIDE),
    "ldexp": (lambda a, w: torch.ldexp(a, torch.tensor(3)), _WIDE),
    "nansum": (lambda a, w: a.nansum(-1), _UNIT),
    "native_group_norm": (
        lambda a, w: torch.native_group_norm(a[None], w[:64], w[64:128], 1, 64, 515, 8, 1e-5)[0],
        _WIDE,
    ),
    "native_layer_norm": (lambda a, w: torch.native_layer_norm(a, (515,), w, w, 1e-5)[0], _WIDE),
    "rms_norm": (lambda a, w: F.rms_norm(a, (515,), w, 1e-6), _WIDE),
    "rsqrt": (torch.rsqrt, _UNIT),
    "sinh": (torch.sinh, _WIDE),
    "softmax": (lambda a, w: F.softmax(a, -1), _WIDE),
    "softplus": (F.softplus, _WIDE),
    "sum": (lambda a, w: a.sum(-1), _UNIT),
    "sum_to_size": (lambda a, w: a.sum_to_size(1, 515), _UNIT),
    "tan": (torch.tan, _UNIT),
}


def test_every_op_that_stays_in_bf16_is_measured() -> None:
    assert sorted(STAY_IN_BF16) == shipped_data("bf16")["none"]


@pytest.mark.parametrize("target", STAY_IN_BF16)
def test_an_op_that_stays_in_bf16_rounds_once(target: str) -> None:
    call, inputs = STAY_IN_BF16[target]
    pointwise = not hasattr(call, "__code__")
    weight = () if pointwise else (_WEIGHT,)
    got = call(inputs, *weight)
    reference = call(inputs.float(), *(tensor.float() for tensor in weight))
    assert got.dtype == torch.bfloat16
    # The kernels of the two dtypes may differ by an fp32 rounding, which flips a bf16 rounding now and then.
    assert got.eq(reference.bfloat16()).float().mean() > 0.999
    torch.testing.assert_close(got.float(), reference, rtol=2**-8, atol=1e-6)


def test_summing_in_bf16_itself_would_fail_that_measure() -> None:
    total = torch.zeros(64, dtype=torch.bfloat16)
    for column in _UNIT.unbind(1):
        total = total + column
    assert total.eq(_UNIT.float().sum(-1).bfloat16()).float().mean() < 0.5


HIDES = """
import json, sys, torch, torch.nn.functional as F
key = torch._C.DispatchKey.AutocastCUDA
without = torch._C.DispatchKeySet(key)
seen = []
library = torch.library.Library("aten", "IMPL")
def spy(name, op):
    def kernel(*args, **kwargs):
        seen.append(name.split(".")[0])
        with torch._C._ExcludeDispatchKeyGuard(without):
            return op(*args, **kwargs)
    library.impl(name, kernel, "AutocastCUDA", allow_override=True)
for full in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
    name = full.removeprefix("aten::")
    base, _, overload = name.partition(".")
    spy(name, getattr(getattr(torch.ops.aten, base), overload or "default"))
x, labels = torch.rand(4, 4) + 0.5, torch.arange(4)
calls = {
    "arccos": lambda: torch.arccos(x), "arcsin": lambda: torch.arcsin(x), "arctan2": lambda: torch.arctan2(x, x),
    "square": lambda: torch.square(x), "ldexp": lambda: torch.ldexp(x, x), "sum_to_size": lambda: x.sum_to_size(4),
    "trapezoid": lambda: torch.trapezoid(x), "trapz": lambda: torch.trapz(x), "inner": lambda: torch.inner(x, x),
    "cumulative_trapezoid": lambda: torch.cumulative_trapezoid(x), "mvlgamma": lambda: torch.mvlgamma(x, 1),
    "norm_except_dim": lambda: torch.norm_except_dim(x), "vander": lambda: torch.vander(x[0]),
    "cross_entropy": lambda: F.cross_entropy(x, labels), "pairwise_distance": lambda: F.pairwise_distance(x, x),
    "interpolate": lambda: F.interpolate(x[None], 8), "cov": lambda: torch.cov(x),
    "corrcoef": lambda: torch.corrcoef(x),
    "matrix_exp": lambda: torch.matrix_exp(x * 50), "matrix_power": lambda: torch.linalg.matrix_power(x, 3),
    "pinv": lambda: torch.linalg.pinv(x), "pinverse": lambda: torch.pinverse(x),
}
torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
found = {}
for name, call in calls.items():
    seen.clear()
    with torch._C._IncludeDispatchKeyGuard(key):
        call()
    found[name] = sorted(set(seen))
json.dump(found, sys.stdout)
"""


def test_functions_said_to_hide_listed_ops_do() -> None:
    text = (loader._shipped_folder() / "default.toml").read_text(encoding="utf-8")
    said = dict(re.findall(r'^ +"(\w+)",  # (?:differs: )?hides (.*)$', text, re.MULTILINE))
    # A process of its own: the spies replace the kernels of the dispatcher.
    run = subprocess.run([sys.executable, "-c", HIDES], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(run.stdout)
    assert sorted(said) == sorted(found)
    for name, hidden in said.items():
        for op in re.split(r", | and ", hidden):
            stem = op.removesuffix("*")
            assert any(hit == stem or (op != stem and stem in hit) for hit in found[name]), (name, op, found[name])


def test_apex_has_its_own_policies() -> None:
    table = load("apex")
    found = policies(table)
    fp16 = (
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm addmv addr matmul"
    )
    fp16 += " mm mv addbmm baddbmm bmm linear __matmul__"
    fp32 = (
        "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow __pow__ __rpow__ cumprod cumsum"
    )
    fp32 += " dist norm prod std sum var renorm softmax log_softmax softmin softplus gelu interpolate grid_sample"
    fp32 += " layer_norm group_norm local_response_norm normalize cosine_similarity poisson_nll_loss cross_entropy"
    fp32 += " cosine_embedding_loss hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss nll_loss"
    fp32 += " multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss smooth_l1_loss"
    fp32 += " binary_cross_entropy_with_logits torch.Tensor.cpu"
    promote = "addcdiv addcmul atan2 cross bilinear dot cat stack"
    for policy, names in {"fp16": fp16, "fp32": fp32, "promote": promote, "banned": "binary_cross_entropy"}.items():
        assert {name: found.get(name) for name in names.split()} == dict.fromkeys(names.split(), policy)
    # What apex.toml leaves to torch's own promotion, for tensors of one dimension or more.
    half, single = torch.ones(2, dtype=torch.float16), torch.ones(2)
    for name in ("add", "sub", "mul", "div"):
        assert found[name] == "none"
        assert getattr(torch, name)(half, single).dtype == torch.float32
    assert torch.add(half, torch.tensor(1.0)).dtype == torch.float16
    assert table.sources == ("lists/default.toml", "lists/apex.toml")


def test_origins_of_shipped_rules_point_at_their_lines() -> None:
    for rule in load("apex").rules:
        assert rule.origin.shipped
        folder, name = rule.origin.path.split("/")
        assert folder == "lists"
        lines = (loader._shipped_folder() / name).read_text(encoding="utf-8").split("\n")
        assert rule.origin.line is not None
        assert re.search(rf'(^|[\s"]){re.escape(rule.target)}("?,|"? =)', lines[rule.origin.line - 1]), rule


@pytest.mark.parametrize("lists_at", ["lists", "autoamp/lists"])
def test_sets_are_found_in_a_checkout_and_when_installed(tmp_path: Path, lists_at: str) -> None:
    package = Path(autoamp.__file__).parent
    shutil.copytree(package / "rules", tmp_path / "autoamp" / "rules", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package / "errors.py", tmp_path / "autoamp")
    (tmp_path / "autoamp" / "__init__.py").touch()
    write(tmp_path / lists_at / "__init__.py", "", schema=False)
    write(tmp_path / lists_at / "default.toml", 'fp32 = ["softmax"]')
    write(tmp_path / lists_at / "mine.toml", "")
    code = (
        "from autoamp.rules import load_table, shipped_sets\ntable = load_table(environ={})\n"
        "print(shipped_sets(), table.rules[0].origin, len(table.rules))"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert run.stdout.split("\n")[0] == "('default', 'mine') lists/default.toml:2 1"


def test_reading_a_list_imports_nothing_that_it_names(tmp_path: Path) -> None:
    write(tmp_path / "nosuch_pkg_a.py", "raise SystemExit(9)", schema=False)
    path = write(
        tmp_path / "x.toml", 'fp32 = ["nosuch_pkg_a.f", "xml.dom.minidom.parse"]\n[modules]\n"wave.Wave" = "fp32"'
    )
    code = (
        "import sys\nfrom autoamp import rules\nbefore = set(sys.modules)\n"
        f"table = rules.load_table({str(path)!r}, environ={{}})\n"
        "print(sorted(set(sys.modules) - before - {'autoamp.lists'}), len(table.modules), 'torch' in before)"
    )
    stub = tmp_path / "stub" / "autoamp"
    stub.mkdir(parents=True)
    stub.joinpath("__init__.py").write_text(f"__path__ = [{str(Path(autoamp.__file__).parent)!r}]", encoding="utf-8")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(stub.parent), str(tmp_path)])}
    run = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[] 1 False\n"


# --- the format ---------------------------------------------------------------------------------------------------


def test_a_file_becomes_rules_with_their_lines(place: Path) -> None:
    text = """
extends = []
# "gelu" is only mentioned here
fp16 = ["einsum",  # "relu"
        'linear', "mypkg.ops.fused"]
"fp32" = [
    # "linear" no
    "softmax",

    \"\"\"mypkg.losses.focal_loss\"\"\", ]
promote = ["cat"]
none = ["gelu"]
[banned]
binary_cross_entropy = "use binary_cross_entropy_with_logits"
"mypkg.bad" = "no"
[modules]
"encoder.layers.0.*" = "fp32"
'torchvision.ops.FrozenBatchNorm2d' = "none"
"""
    path = write(place / "mine.toml", text)
    table = load(path)
    got = {rule.target: (rule.policy.name, rule.origin.line) for rule in table.rules}
    assert got == {
        "einsum": ("FP16", 5),
        "linear": ("FP16", 6),
        "softmax": ("FP32", 9),
        "cat": ("PROMOTE", 12),
        "gelu": ("NONE", 13),
        "binary_cross_entropy": ("BANNED", 15),
        "mypkg.ops.fused": ("FP16", 6),
        "mypkg.losses.focal_loss": ("FP32", 11),
        "mypkg.bad": ("BANNED", 16),
    }
    assert [rule.bare for rule in table.rules] == [True] * 6 + [False] * 3
    assert {rule.remedy for rule in table.rules} == {"", "use binary_cross_entropy_with_logits", "no"}
    origin = table.rules[0].origin
    assert (str(origin), origin.shipped) == (f"{path}:5", False)
    assert table.modules == (
        ModuleRule("encoder.layers.0.*", ModulePrecision.FP32, Origin(str(path), 18, False)),
        ModuleRule("torchvision.ops.FrozenBatchNorm2d", ModulePrecision.NONE, Origin(str(path), 19, False)),
    )
    assert table.sources == (str(path),)


def test_a_none_table_gives_each_name_its_reason(place: Path) -> None:
    text = 'extends = []\n[none]\n"moves elements" = ["cat",\n"stack"]\nrandom = ["dropout", "mypkg.ops.noise"]'
    table = load(write(place / "mine.toml", text))
    assert [(rule.target, rule.policy, rule.reason, rule.origin.line) for rule in table.rules] == [
        ("cat", CastPolicy.NONE, "moves elements", 4),
        ("stack", CastPolicy.NONE, "moves elements", 5),
        ("dropout", CastPolicy.NONE, "random", 6),
        ("mypkg.ops.noise", CastPolicy.NONE, "random", 6),
    ]


def test_a_rule_may_be_limited_to_versions(place: Path) -> None:
    text = 'extends = []\nfp32 = ["polar", "exp"]\n[versions]\npolar = ">=2.14"'
    table = load(write(place / "mine.toml", text))
    assert {rule.target: (rule.versions, rule.origin.line) for rule in table.rules} == {
        "polar": (">=2.14", 3),
        "exp": ("", 3),
    }


def test_a_rule_may_be_limited_to_devices(place: Path) -> None:
    write(place / "below.toml", 'extends = []\nfp32 = ["exp", "log"]')
    text = 'extends = "./below.toml"\nnone = ["exp", "log"]\n[devices]\nexp = "cpu"\nlog = "cuda, xpu"'
    above = str(write(place / "above.toml", text))
    assert policies(load(above, device_type="cpu")) == {"exp": "none", "log": "fp32"}
    assert policies(load(above, device_type="xpu")) == {"exp": "fp32", "log": "none"}
    assert {rule.target: rule.devices for rule in load(above).rules} == {"exp": ("cpu",), "log": ("cuda", "xpu")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[none]\nmoves = "cat"', r":3: none 'moves' must be an array of names, under the reason .*; got 'cat'"),
        ("[none]\nmoves = [1]", r":3: none moves must be an array of strings; got 1"),
        ('fp32 = ["cat"]\n[none]\nmoves = ["cat"]', r":4: 'cat' is under fp32 .* and again under none"),
        (
            'fp32 = ["exp"]\n[versions]\nexpp = ">=2.1"',
            r":4: 'expp' under versions has no rule here; did you mean 'exp'",
        ),
        ('fp32 = ["exp"]\n[versions]\nexp = "2.1"', r":4: 'exp' under versions has '2.1'; write '>=2.13'"),
        ('fp32 = ["exp"]\n[versions]\nexp = 2', r":4: versions 'exp' must be a string"),
        (
            'fp32 = ["exp"]\n[devices]\nexpp = "cpu"',
            r":4: 'expp' under devices has no rule here; did you mean 'exp'",
        ),
        (
            'fp32 = ["exp"]\n[devices]\nexp = "cdua"',
            r":4: 'exp' under devices has 'cdua'; write one of 'cpu', 'cuda', .*",
        ),
        ('fp32 = ["exp"]\n[devices]\nexp = "cuda:0"', r":4: 'exp' under devices has 'cuda:0'"),
        ('fp32 = ["exp"]\n[devices]\nexp = ["cpu"]', r":4: devices 'exp' must be a string"),
    ],
)
def test_wrong_reasons_and_limits(place: Path, text: str, message: str) -> None:
    with pytest.raises(ListFileError, match=message):
        load(write(place / "mine.toml", text))


def test_lines_of_inline_and_dotted_tables(place: Path) -> None:
    text = 'extends = []\nbanned.relu = "r"\nmodules = { "a.b" = "fp32", c = "fp16" }\nnone = []'
    table = load(write(place / "mine.toml", text))
    assert [(rule.target, rule.origin.line) for rule in table.rules] == [("relu", 3)]
    assert [(rule.pattern, rule.origin.line) for rule in table.modules] == [("a.b", 4), ("c", 4)]


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(place: Path) -> None:
    path = place / "mine.toml"
    path.write_bytes(b'\xef\xbb\xbfschema = 1\r\nextends = []\r\nfp32 = [\r\n"softmax",\r\n]\r\n')
    assert load(path).rules == (CastRule("softmax", CastPolicy.FP32, Origin(str(path), 4, False)),)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('fp23 = ["softmax"]', 2, ["unknown key 'fp23'", "'fp32'", "'modules'"]),
        ("lists = []", 2, ["unknown key 'lists'"]),
        ("[bannd]\nx = 'y'", 2, ["unknown key 'bannd'", "did you mean 'banned'"]),
        ('fp32 = ["softmax"]\nfp16 = [\n"linear",\n"softmax"]', 2, ["'softmax'", "fp16", "fp32", ":2)", ":5)"]),
        ('fp32 = ["softmax"]\n[banned]\nsoftmax = "no"', 4, ["'softmax'", "fp32", "banned", ":2)", ":4)"]),
        ('fp32 = ["softmax",\n"softmax"]', 3, ["'softmax'", ":2)", ":3)"]),
        ('fp32 = "softmax"', 2, ["fp32 must be an array of strings", "'softmax'", "(str)"]),
        ("none = [\n1]", 2, ["none must be an array of strings", "1 (int)"]),
        ("fp32 = [['softmax']]", 2, ["['softmax'] (list)"]),
        ("extends = 1.5", 2, ["extends must be a string or an array of strings", "1.5 (float)"]),
        ("extends = [true]", 2, ["True (bool)"]),
        ("banned = ['x']", 2, ["banned must be a table", "(list)"]),
        ("[banned]\n\nx = 3", 4, ["banned 'x' must be a string", "3 (int)"]),
        ("[banned]\nmypkg.f = 'no'", 3, ["banned 'mypkg'", "quotes", "(dict)"]),
        ("[modules]\n'a' = 'fp8'", 3, ["'a'", "'fp8'", "choose 'fp16', 'fp32', 'none'"]),
        ("[modules]\n'' = 'fp32'", 3, ["''", "no pattern"]),
        ("[modules]\n'a b' = 'fp32'", 3, ["'a b'", "no pattern"]),
        ("fp32 = ['soft max']", 2, ["'soft max'", "no target"]),
        ("fp32 = ['softmax', '']", 2, ["'' under fp32"]),
        ("fp32 = [\n'torch..softmax']", 3, ["'torch..softmax'"]),
        ("[banned]\n'a.1b' = 'no'", 3, ["'a.1b' under banned"]),
        ("extends = 'defalt'", 2, ["'defalt' is unknown", "did you mean 'default'"]),
        ("extends = [\n'default',\n'./gone.toml']", 4, ["gone.toml", "cannot be read"]),
        ("fp32 = [\n'softmax'\n'gelu'\n]", 4, ["not valid TOML"]),
        ("fp32 = [", 2, ["not valid TOML"]),
        ("fp32 = []\nfp32 = []", 3, ["not valid TOML"]),
        ("fp32 = " + "[" * 5000, None, ["not valid TOML"]),
    ],
)  # fmt: skip
def test_a_wrong_file_says_what_is_wrong_and_where(place: Path, text: str, line: int | None, words: list[str]) -> None:
    path = write(place / "mine.toml", text)
    with pytest.raises(ListFileError) as caught:
        load(path)
    assert (caught.value.path, caught.value.line) == (str(path), line)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("fp32 = []", None, ["no schema", "'schema = 1'"]),
        ("\nschema = 2", 2, ["schema=2", "'schema = 1'"]),
        ("schema = true", 1, ["schema=True (bool)"]),
        ("schema = '1'", 1, ["schema='1' (str)"]),
        ("schema = 1.0", 1, ["schema=1.0 (float)"]),
    ],
)
def test_a_wrong_schema(place: Path, text: str, line: int | None, words: list[str]) -> None:
    path = write(place / "mine.toml", text, schema=False)
    with pytest.raises(ListFileError) as caught:
        load(path)
    assert (caught.value.path, caught.value.line) == (str(path), line)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_not_utf8(place: Path) -> None:
    path = place / "mine.toml"
    path.write_bytes(b"schema = 1\n# \xff\n")
    with pytest.raises(ListFileError, match="not UTF-8") as caught:
        load(path)
    assert caught.value.line == 2


def test_a_cycle_of_extends_shows_the_chain(place: Path) -> None:
    a, b, c = place / "a.toml", place / "b.toml", place / "sub" / "c.toml"
    write(a, "extends = ['b.toml']")
    write(b, "extends = ['default', 'sub/c.toml']")
    write(c, "\nextends = '../sub/../b.toml'")
    with pytest.raises(ListFileError, match="circle") as caught:
        load(a)
    assert f"{b} -> {c} -> {b}" in str(caught.value)
    assert (caught.value.path, caught.value.line) == (str(c), 3)
    write(a, "extends = 'a.toml'")
    with pytest.raises(ListFileError, match=f"{re.escape(str(a))} -> {re.escape(str(a))}"):
        load(a)


# --- discovery and layers -----------------------------------------------------------------------------------------


def test_with_no_source_the_base_is_the_table(place: Path) -> None:
    assert load() == load("default")
    assert load(base="bf16") == load("bf16")
    assert load().sources == ("lists/default.toml",)


def test_a_file_edits_the_base(place: Path) -> None:
    path = write(place / "mine.toml", "fp32 = ['linear']\nnone = ['softmax', 'mypkg.f']")
    table = load(path, base="apex")
    assert table.sources == ("lists/default.toml", "lists/apex.toml", str(path))
    assert policies(table)["linear"] == "fp32"
    assert policies(table)["softmax"] == policies(table)["mypkg.f"] == "none"
    assert policies(table)["gelu"] == "fp32"
    assert len([rule for rule in table.rules if rule.target == "linear"]) == 1
    assert table.rules[-3:] == tuple(rule for rule in table.rules if rule.origin.path == str(path))


def test_a_dotted_name_beats_a_bare_one_of_its_file_but_not_of_a_later_one(place: Path) -> None:
    first = write(place / "a.toml", "fp32 = ['torch.relu']\nnone = ['relu']")
    second = write(place / "b.toml", "fp16 = ['relu']")
    assert [rule.target for rule in load([first]).rules[-2:]] == ["relu", "torch.relu"]
    assert [rule.target for rule in load([first, second]).rules[-2:]] == ["torch.relu", "relu"]


def test_extends_are_bases_below_every_own_rule_each_once(place: Path) -> None:
    common = write(place / "common" / "common.toml", "extends = 'apex'\nfp16 = ['gelu', 'relu']")
    mine = write(place / "mine.toml", "extends = ['common/common.toml', 'default']\nnone = ['relu']")
    other = write(place / "other.toml", "fp32 = ['linear']\nextends = 'bf16'")
    table = load([mine, other])
    assert table.sources == (
        "lists/default.toml", "lists/apex.toml", str(common), "lists/bf16.toml", str(mine), str(other),
    )  # fmt: skip
    found = policies(table)
    assert (found["gelu"], found["relu"], found["linear"], found["sum"]) == ("fp16", "none", "fp32", "none")


def test_work_does_not_double_with_every_level_of_extends(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place / "z0.toml", "extends = 'default'")
    for depth in range(1, 10):
        below = f"'z{depth - 1}.toml'"
        write(place / f"z{depth}.toml", f"extends = [{below}, {below}]")
    reads: list[bytes] = []
    parse = loader.parse_toml
    monkeypatch.setattr(loader, "parse_toml", lambda raw: reads.append(raw) or parse(raw))
    assert len(load("./z9.toml").sources) == 11
    assert len(reads) < 25


def test_names_choose_the_base_wherever_they_stand(place: Path) -> None:
    mine = write(place / "mine.toml", "none = ['gelu']")
    assert load([mine, "apex"]).sources == ("lists/default.toml", "lists/apex.toml", str(mine))
    assert load(mine, environ={"AUTOAMP_LISTS": "bf16"}, base="apex").sources[:2] == (
        "lists/default.toml",
        "lists/bf16.toml",
    )


def test_no_base_where_none_is_wanted(place: Path) -> None:
    assert load({"extends": []}).rules == ()
    assert load(CastTable()) == CastTable()
    table = load({"extends": [], "fp32": ["softmax"], "modules": {"head": "fp32"}})
    assert load(table) == table


def test_sources_come_in_order_the_later_over_the_earlier(place: Path) -> None:
    write(place / "autoamp.toml", "none = ['relu', 'gelu', 'silu']")
    env = write(place / "env.toml", "fp32 = ['gelu', 'silu']")
    table = load({"fp16": ["silu"]}, environ={"AUTOAMP_LISTS": os.pathsep.join(["apex", str(env), ""])})
    assert table.sources == (
        "lists/default.toml", "lists/apex.toml", str(place / "autoamp.toml"), str(env), "lists=",
    )  # fmt: skip
    found = policies(table)
    assert (found["relu"], found["gelu"], found["silu"]) == ("none", "fp32", "fp16")
    assert str(table.rules[-1].origin) == "lists="


def test_os_environ_is_the_default_environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOAMP_LISTS", "apex")
    assert load_table() == load("apex")
    monkeypatch.delenv("AUTOAMP_LISTS")
    assert load_table() == load("default")


@pytest.mark.parametrize("kind", [str, Path, lambda path: [path], lambda path: ((path,),)])
def test_kinds_of_lists(place: Path, kind: Callable[[Path], object]) -> None:
    write(place / "mine.toml", "fp16 = ['gelu']")
    assert policies(load(kind(Path("mine.toml"))))["gelu"] == "fp16"


def test_a_mapping_is_a_list_and_is_not_changed(place: Path) -> None:
    given_lists = {"schema": 1, "extends": "apex", "fp16": ("gelu",), "banned": {"relu": "no"}}
    copy = {**given_lists, "banned": {"relu": "no"}}
    table = load(given_lists)
    assert table.policy_of("gelu") == CastRule("gelu", CastPolicy.FP16, Origin("lists=", None, False))
    assert table.policy_of("relu") == CastRule("relu", CastPolicy.BANNED, Origin("lists=", None, False), "no")
    assert table.sources == ("lists/default.toml", "lists/apex.toml", "lists=")
    assert given_lists == copy


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (3, ["3 (int)", "a mapping"]),
        (b"apex", ["(bytes)"]),
        (["default", 2.5], ["2.5 (float)"]),
        ({"apex"}, ["(set)"]),
        ("apx", ["'apx' is unknown", "'apex'", "'default'"]),
        ("default.tom", ["'default.tom' is unknown"]),
        ("gone.toml", ["gone.toml", "cannot be read"]),
        (".", ["'.' is unknown"]),
        ("./", ["cannot be read"]),
        ("nul\0/x.toml", ["cannot be read"]),
        (Path("gone"), ["gone", "cannot be read"]),
        ({"fp32": "softmax"}, ["fp32 must be an array of strings"]),
        ({"fp32": [None]}, ["None (NoneType)"]),
        ({1: []}, ["unknown key 1"]),
        ({"schema": 3}, ["schema=3"]),
        ({"modules": {3: "fp32"}}, ["modules 3", "(int)"]),
        ({"fp16": ["gelu"], "fp32": ["gelu"]}, ["'gelu'", "fp16", "fp32"]),
    ],
)
def test_a_wrong_argument(place: Path, lists: object, words: list[str]) -> None:
    with pytest.raises(ListFileError) as caught:
        load(lists)
    assert (caught.value.path, caught.value.line) == ("lists=", None)
    for word in words:
        assert word in str(caught.value)


def test_a_wrong_name_in_the_environment(place: Path) -> None:
    with pytest.raises(ListFileError, match=r"^AUTOAMP_LISTS: list set 'apxe' is unknown; did you mean 'apex'\?"):
        load(environ={"AUTOAMP_LISTS": "apxe"})
    with pytest.raises(ListFileError, match=r"^base=: list set 'fp8'"):
        load(base="fp8")


def test_the_nearest_folder_that_has_a_list_is_used(place: Path) -> None:
    write(place / "autoamp.toml", "fp16 = ['relu']")
    inner = place / "a" / "b" / "c"
    inner.mkdir(parents=True)
    assert policies(load(start=inner))["relu"] == "fp16"
    write(place / "a" / "pyproject.toml", "[project]\nname = 'autoamp-user'\n[tool.ruff]\n", schema=False)
    assert policies(load(start=inner))["relu"] == "fp16"
    write(place / "a" / "b" / "pyproject.toml", "[tool.autoamp]\nfp32 = ['gelu']", schema=False)
    found = policies(load(start=inner))
    assert (found["relu"], found["gelu"]) == ("none", "fp32")
    assert policies(load(start=Path("a/b/c"))) == found
    assert policies(load(start=place))["gelu"] == "none"


def test_a_broken_pyproject_of_somebody_else_is_not_ours(place: Path) -> None:
    path = write(place / "pyproject.toml", "[tool\n", schema=False)
    assert load() == load("default")
    write(path, "[tool.autoamp\n", schema=False)
    with pytest.raises(ListFileError, match="not valid TOML") as caught:
        load()
    assert (caught.value.path, caught.value.line) == (str(path), 1)


def test_pyproject_has_lines_names_and_paths(place: Path) -> None:
    extra = write(place / "conf" / "extra.toml", "fp16 = ['gelu', 'silu']")
    path = write(place / "pyproject.toml", """
[tool.other]
fp32 = ["gelu"]
[tool.autoamp]
lists = ["apex", "conf/extra.toml"]
fp32 = [
  "silu",
]
[tool.autoamp.modules]
head = "fp32"
""", schema=False)  # fmt: skip
    deep = place / "x"
    deep.mkdir()
    table = load(start=deep)
    assert table.sources == ("lists/default.toml", "lists/apex.toml", str(extra), str(path))
    assert table.policy_of("silu") == CastRule("silu", CastPolicy.FP32, Origin(str(path), 7, False))
    assert table.modules == (ModuleRule("head", ModulePrecision.FP32, Origin(str(path), 10, False)),)
    write(path, "[tool]\nautoamp = 3", schema=False)
    with pytest.raises(ListFileError, match="must be a table; got 3") as caught:
        load()
    assert caught.value.line == 2
    write(path, "[tool.autoamp]\nlists = [\n'apex',\n'conf/gone.toml']", schema=False)
    with pytest.raises(ListFileError, match="cannot be read") as caught:
        load()
    assert (caught.value.path, caught.value.line) == (str(path), 4)
    write(path, "[tool.autoamp]\n\nfp32 = ['a b']", schema=False)
    with pytest.raises(ListFileError, match="'a b'") as caught:
        load()
    assert caught.value.line == 3


def test_two_lists_in_one_folder_are_an_error_that_names_both(place: Path) -> None:
    write(place / "autoamp.toml", "")
    write(place / "pyproject.toml", "[tool.autoamp]", schema=False)
    with pytest.raises(ListFileError) as caught:
        load()
    assert str(place / "autoamp.toml") in str(caught.value)
    assert str(place / "pyproject.toml") in str(caught.value)


# --- bare names ---------------------------------------------------------------------------------------------------


def test_an_unknown_op_of_a_user_is_an_error_with_the_nearest_names(place: Path) -> None:
    path = write(place / "mine.toml", "extends = []\nfp32 = [\n'sofmax']")
    with pytest.raises(ListFileError, match="'sofmax' under fp32; did you mean 'softmax'") as caught:
        check_bare_names(load(path), {"softmax", "linear"})
    assert (caught.value.path, caught.value.line) == (str(path), 4)
    for key in ("none", "promote"):
        with pytest.raises(ListFileError, match=f"'lineer' under {key}; did you mean 'linear'"):
            check_bare_names(load({"extends": [], key: ["lineer"]}), ["softmax", "linear"])
    with pytest.raises(ListFileError, match="'zzz' under banned; nothing near"):
        check_bare_names(load({"extends": [], "banned": {"zzz": "no"}}), ["softmax"])


def test_dotted_and_known_names_pass() -> None:
    assert check_bare_names(load({"extends": [], "fp32": ["softmax", "my.sofmax"]}), ["softmax"]) == ()


def test_shipped_names_that_torch_lacks_are_returned() -> None:
    table = load("apex")
    known = {rule.target for rule in table.rules if rule.bare} - {"gelu", "vecdot"}
    assert [rule.target for rule in check_bare_names(table, known)] == ["vecdot", "gelu"]


# --- properties ---------------------------------------------------------------------------------------------------

identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
targets = st.lists(identifiers, min_size=1, max_size=3).map(".".join)
remarks = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
patterns = st.from_regex(r"[A-Za-z_*][A-Za-z0-9_.*]{0,8}", fullmatch=True)


@st.composite
def list_sets(draw: st.DrawFn) -> dict[str, Any]:
    """The content of a valid list set that extends nothing."""
    names = draw(st.lists(targets, unique=True, max_size=12))
    keys = [draw(st.sampled_from([*POLICY_KEYS, "banned"])) for _ in names]
    data: dict[str, Any] = {"schema": 1, "extends": []}
    for key in POLICY_KEYS:
        data[key] = [name for name, at in zip(names, keys, strict=True) if at == key]
    data["banned"] = {name: draw(remarks) for name, at in zip(names, keys, strict=True) if at == "banned"}
    data["modules"] = draw(st.dictionaries(patterns, st.sampled_from(["fp16", "fp32", "none"]), max_size=4))
    return data


def quoted(text: str, draw: st.DrawFn) -> str:
    plain = re.fullmatch(r"[A-Za-z0-9_.*]+", text) is not None
    style = draw(st.sampled_from(['"', "'", '"""', "'''"] if plain else ['"']))
    return f"{style}{text}{style}" if plain else json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@st.composite
def toml_texts(draw: st.DrawFn) -> tuple[dict[str, Any], str, dict[str, int]]:
    """A valid list set, its text in a random layout, and the line of each target and pattern."""
    data = draw(list_sets())
    noise = st.lists(st.sampled_from(["", "  # fp32 = ['linear']", "\t", '# "softmax"]']), max_size=2)
    lines: list[str] = []
    places: dict[str, int] = {}

    def feed() -> None:
        lines.extend(draw(noise))

    for key in draw(st.permutations(["schema", "extends", *POLICY_KEYS])):
        feed()
        if key == "schema":
            lines.append("schema = 1")
            continue
        lines.append(draw(st.sampled_from([f"{key} = [", f'"{key}"  =  [', f"'{key}'=["])))
        for entry in data[key]:
            if draw(st.booleans()):
                lines[-1] += draw(st.sampled_from(["", "  # ]", " # 'x'"]))
                feed()
                lines.append("")
            places[entry] = len(lines)
            value = quoted(entry, draw)
            # A comment on this line would swallow the entry.
            if "#" in lines[-1]:
                lines.append("")
                places[entry] += 1
            lines[-1] += f"{value} ,"
        lines.append("]")
    for key in draw(st.permutations(["banned", "modules"])):
        feed()
        inline = draw(st.booleans())
        # An inline table would fall under the header of the table before it.
        inline = inline and not any(line.startswith("[") for line in lines)
        lines.append(f"{key} = {{" if inline else draw(st.sampled_from([f"[{key}]", f'[ "{key}" ] # x = "y"'])))
        entries = list(data[key].items())
        for name, value in entries:
            shown = quoted(name, draw) if inline or "." in name or "*" in name else name
            shown = shown.replace('"""', '"').replace("'''", "'")
            if not inline:
                feed()
                lines.append("")
            places[f"{key}:{name}"] = len(lines)
            lines[-1] += f"{shown} = {quoted(value, draw)}" + ", " * (inline and name != entries[-1][0])
        if inline:
            lines[-1] += "}"
    return data, "\n".join(lines), places


@settings(max_examples=150, deadline=None)
@given(toml_texts())
def test_what_is_written_is_read_back_with_its_lines(
    tmp_path_factory: pytest.TempPathFactory, written: tuple[dict[str, Any], str, dict[str, int]]
) -> None:
    data, text, places = written
    path = tmp_path_factory.mktemp("lists") / "mine.toml"
    path.write_text(text, encoding="utf-8", newline="\n")
    table = load(path)
    expected = {name: key for key in POLICY_KEYS for name in data[key]}
    expected |= dict.fromkeys(data["banned"], "banned")
    assert policies(table) == expected
    assert {rule.target: rule.remedy for rule in table.rules if rule.policy is CastPolicy.BANNED} == data["banned"]
    assert {rule.pattern: rule.precision.value for rule in table.modules} == data["modules"]
    for rule in table.rules:
        banned = "banned:" * (rule.policy is CastPolicy.BANNED)
        assert rule.origin.line == places[banned + rule.target]
    for module in table.modules:
        assert module.origin.line == places[f"modules:{module.pattern}"]
    same = load(data)
    assert [(rule.target, rule.policy) for rule in same.rules] == [(rule.target, rule.policy) for rule in table.rules]


garbage = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(
        st.sampled_from(
            [*"[]{}=,.\n\"'#\\ ", '"""', "'''", "schema = 1\n", "fp32", "banned", "[modules]\n", "'a'", "1", "extends",
             "1979-05-27", "inf", "'default'", "true", "x = 'y'"]
        ),
        max_size=25,
    ).map(lambda parts: ("schema = 1\n" + "".join(parts)).encode()),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(garbage)
def test_garbage_raises_nothing_but_a_list_file_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("lists") / "mine.toml"
    path.write_bytes(content)
    with contextlib.suppress(ListFileError):
        assert load(path).sources[-1] == str(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*POLICY_KEYS, "schema", "extends", "banned", "modules", "x"]), values))
def test_a_mapping_of_garbage_raises_nothing_but_a_list_file_error(data: dict[str, Any]) -> None:
    with contextlib.suppress(ListFileError):
        assert load(data).sources[-1] == "lists="


toml_values = st.recursive(
    st.sampled_from(["1", "1.5e3", "true", "1979-05-27T07:32:00Z", "'s'", '"a]b"', '"""m\n"q" #\n"""', "'''\n]'''"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[ # [\n" + ",\n".join(items) + "\n]")
        | st.lists(inner, max_size=2).map(
            lambda items: "{" + ", ".join(f"k{i} = {v}" for i, v in enumerate(items)) + "}"
        )
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(toml_values, max_size=6))
def test_lines_of_keys_between_values_of_every_kind(items: list[str]) -> None:
    text, expected = "", {}
    for number, value in enumerate(items):
        text += f"# c = [\n[t.'x y'.n{number}]\n"
        expected["t", "x y", f"n{number}"] = text.count("\n")
        text += f'a . "b" = {value} # "\n'
        expected["t", "x y", f"n{number}", "a", "b"] = text.count("\n") - value.count("\n")
    tomllib.loads(text)
    found = TomlLines(text)
    assert {path: found.of(path) for path in expected} == expected


def test_lines_after_values_that_mislead_a_reader() -> None:
    assert TomlLines("x = [{a = 1},\n{b = 2}]\ny = 3").keys == {("x",): 1, ("x", "a"): 1, ("x", "b"): 2, ("y",): 3}
    text = 'x = """["""""\ny = \'\'\'[\'\'\'\'\nz = "\\"["\nw = 1'
    assert tomllib.loads(text) == {"x": '[""', "y": "['", "z": '"[', "w": 1}
    assert TomlLines(text).keys == {("x",): 1, ("y",): 2, ("z",): 3, ("w",): 4}
    assert TomlLines('x = ["""["""", "]",\n"["]').items == {("x",): [1, 1, 2]}


@settings(max_examples=150, deadline=None)
@given(list_sets(), list_sets(), list_sets())
def test_overlays_are_associative_idempotent_and_the_last_one_wins(
    one: dict[str, Any], two: dict[str, Any], three: dict[str, Any]
) -> None:
    a, b, c = load(one), load(two), load(three)
    merged = a.overlaid(b).overlaid(c)
    assert merged == a.overlaid(b.overlaid(c))
    assert a.overlaid(a) == a
    assert merged.overlaid(c) == merged
    assert a.overlaid(CastTable()) == CastTable().overlaid(a) == a
    assert merged == load([one, two, three])
    assert policies(merged) == policies(a) | policies(b) | policies(c)
    assert len(merged.rules) == len(policies(merged))
    assert merged.rules[len(merged.rules) - len(c.rules) :] == c.rules
    for rule in merged.rules:
        assert merged.policy_of(rule.target) is rule
    expected = {rule.pattern: rule.precision for table in (a, b, c) for rule in table.modules}
    assert {rule.pattern: rule.precision for rule in merged.modules} == expected


def test_policy_of_a_name_that_is_not_there() -> None:
    assert load("default").policy_of("torch.softmax") is None
