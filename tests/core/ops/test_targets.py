"""Targets: which attributes of the installed torch a table's rules come to."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import autoamp
from autoamp.core import (
    CastPolicy,
    CastRule,
    CastTable,
    RuleSource,
    Target,
    expand,
    known_ops,
    load_table,
    locate,
    owns_its_names,
    target_at,
)
from autoamp.errors import ListFileError
from tests.core.patching._shared import package


def rule(target: str, policy: CastPolicy = CastPolicy.FP16, *, shipped: bool = False, line: int | None = 7) -> CastRule:
    return CastRule(target, policy, RuleSource("my.toml", line, shipped))


def table(*rules: CastRule) -> CastTable:
    return CastTable(rules)


def names(targets: tuple[Target, ...]) -> set[str]:
    return {target.name for target in targets}


def by_name(*rules: CastRule) -> dict[str, Target]:
    return {target.name: target for target in expand(table(*rules)).targets}


# -- bare names --


@pytest.mark.parametrize(
    ("bare", "spellings"),
    [
        ("matmul", {"torch.matmul", "torch.Tensor.matmul", "torch.linalg.matmul", "torch._VF.matmul"}),
        ("linear", {"torch.nn.functional.linear"}),
        ("conv2d", {"torch.conv2d", "torch.nn.functional.conv2d", "torch._VF.conv2d"}),
        (
            "exp",
            {"torch.exp", "torch.exp_", "torch.Tensor.exp", "torch.Tensor.exp_", "torch._VF.exp", "torch._VF.exp_"},
        ),
        ("__pow__", {"torch.Tensor.__pow__", "torch.Tensor.__ipow__"}),
        ("einsum", {"torch.einsum", "torch.functional.einsum"}),
        ("expm1", {"torch.special.expm1", "torch.expm1", "torch.Tensor.expm1", "torch.Tensor.expm1_", "torch.expm1_"}),
        ("fft", {"torch.fft.fft"}),
        ("multi_dot", {"torch.linalg.multi_dot"}),
    ],
)
def test_a_bare_name_is_every_public_spelling(bare: str, spellings: set[str]) -> None:
    found = names(expand(table(rule(bare, CastPolicy.FP32))).targets)
    assert spellings <= found
    short = {name.rpartition(".")[2] for name in found}
    assert short <= {bare, f"{bare}_", f"__i{bare[2:]}"}


def test_in_place_forms_and_what_they_compute_with() -> None:
    found = by_name(rule("exp", CastPolicy.FP32), rule("__pow__", CastPolicy.PROMOTE))
    assert found["torch.Tensor.exp_"].functional is torch.Tensor.exp
    assert found["torch.exp_"].functional is torch.exp
    assert found["torch.Tensor.__ipow__"].functional is torch.Tensor.__pow__
    assert found["torch.exp"].functional is None
    assert found["torch.Tensor.__pow__"].functional is None
    # A method is not in the module that defines it.
    assert by_name(rule("norm")).keys() == {
        "torch.norm", "torch.functional.norm", "torch.linalg.norm", "torch.Tensor.norm"
    }  # fmt: skip
    # One may be named itself.
    found = by_name(rule("exp_"))
    assert found.keys() >= {"torch.Tensor.exp_", "torch.exp_"}
    assert "torch.exp" not in found
    assert found["torch.Tensor.exp_"].functional is torch.Tensor.exp
    # `Tensor.real` is no method.
    found = by_name(rule("real"))
    assert "torch.real" in found
    assert "torch.Tensor.real" not in found
    # Outside of torch the underscore says nothing.
    module = types.ModuleType("underscored")
    module.scale, module.scale_ = len, sorted  # type: ignore[attr-defined]
    assert target_at(module, "scale_", rule("underscored.scale_")).functional is None


def test_a_rule_to_half_promotes_in_place() -> None:
    found = by_name(*map(rule, ("addmm", "addmv", "addr", "baddbmm", "addbmm", "exp")))
    assert {"torch.Tensor.addmm", "torch.addbmm", "torch._VF.exp"} <= found.keys()
    in_place = {name: target.rule.policy for name, target in found.items() if name.endswith("_")}
    assert "torch.Tensor.addmm_" in in_place
    assert set(in_place.values()) == {CastPolicy.PROMOTE}


def test_a_shipped_name_that_this_torch_lacks_is_skipped_and_reported() -> None:
    lacking, dotted = rule("no_such_op", shipped=True), rule("torch.no_such_op", shipped=True)
    left_alone = rule("no_such_op_either", CastPolicy.NONE, shipped=True), rule("exp", CastPolicy.NONE)
    expansion = expand(table(lacking, *left_alone, dotted, rule("linear")))
    assert expansion.skipped == (lacking, dotted)
    assert names(expansion.targets) == {"torch.nn.functional.linear"}


def test_known_ops_are_functions_of_the_public_namespaces() -> None:
    known = known_ops()
    assert {"linear", "softmax", "__matmul__", "einsum", "multi_dot", "erfinv", "rfft", "exp_"} <= known
    assert not {"Tensor", "nn", "float32", "__name__", "device"} & known


@pytest.mark.parametrize("base", ["default", "apex", "bf16"])
def test_the_shipped_sets_lack_nothing_in_the_torch_they_are_made_for(base: str, tmp_path: Path) -> None:
    expansion = expand(load_table(base=base, start=tmp_path, environ={}))
    assert len(expansion.targets) > 200
    assert [str(skipped.target) for skipped in expansion.skipped] == []


# -- which rule wins --


def test_the_later_rule_wins_for_one_place() -> None:
    found = by_name(rule("conv2d"), rule("torch.nn.functional.conv2d", CastPolicy.FP32))
    assert found["torch.nn.functional.conv2d"].rule.policy is CastPolicy.FP32
    assert found["torch.conv2d"].rule.policy is CastPolicy.FP16
    assert by_name(rule("torch.conv2d")).keys() == {"torch.conv2d"}
    # NONE takes an inherited rule away.
    assert by_name(rule("gelu"), rule("gelu", CastPolicy.NONE)) == {}
    found = by_name(rule("exp"), rule("torch.Tensor.exp", CastPolicy.NONE))
    assert "torch.Tensor.exp" not in found
    assert "torch.exp" in found


# -- dotted names --


class Focal(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Inherits(Focal):
    pass


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Plain:
    value = 3

    def method(self, x: Any) -> Any:
        return x

    @staticmethod
    def static(x: Any) -> Any:
        return x


def test_a_class_stands_for_the_method_that_does_its_work() -> None:
    here = sys.modules[__name__]
    for cls, method in ((Focal, "forward"), (Inherits, "forward"), (Scale, "apply")):
        target = target_at(here, cls.__name__, rule(f"{__name__}.{cls.__name__}"))
        assert (target.parent, target.attribute) == (cls, method)
        assert target.name == f"{__name__}.{cls.__name__}.{method}"
    assert target_at(torch.nn, "MaxPool2d", rule("torch.nn.MaxPool2d")).parent is torch.nn.MaxPool2d


def test_descriptors_of_a_class_are_taken_as_they_are_and_of_an_object_bound_methods() -> None:
    for cls, name in ((Plain, "method"), (Plain, "static"), (Scale, "forward")):
        assert target_at(cls, name, rule(f"x.{name}")).original is vars(cls)[name]
    plain = Plain()
    target = target_at(plain, "method", rule("plain.method"))
    assert target.original == plain.method
    assert target.name == f"{__name__}.Plain.method"


@pytest.mark.parametrize(
    ("parent", "name", "message"),
    [
        (Plain, "value", "is an int; name a function or a method"),
        (sys.modules[__name__], "Plain", r"only an nn\.Module or an autograd\.Function"),
    ],
)
def test_an_attribute_that_cannot_be_called_is_refused_as_a_target(parent: Any, name: str, message: str) -> None:
    with pytest.raises(ListFileError, match=message):
        target_at(parent, name, rule(f"x.{name}"))


@pytest.mark.parametrize(
    ("typo", "said"),
    [
        ("softmaxx", "unknown op 'softmaxx'.*'softmax'"),
        ("linaer", "unknown op 'linaer'.*'linear'"),
        ("MatMul", "unknown op 'MatMul'.*'matmul'"),
        ("torch.nn.functional.sofmax", "names nothing: torch.nn.functional has no 'sofmax'; did you mean 'torch.nn."
         "functional.softmax'"),
        ("torch.nn.functionl.softmax", "torch.nn has no 'functionl'; did you mean 'torch.nn.functional.softmax'"),
        ("torch.nn.Linear.forwrad", "torch.nn.Linear has no 'forwrad'; did you mean 'torch.nn.Linear.forward'"),
        ("torch.nn.xyzzyxyzzy", "torch.nn has no 'xyzzyxyzzy'"),
    ],
)  # fmt: skip
def test_a_typo_is_an_error_with_the_nearest_name(typo: str, said: str) -> None:
    with pytest.raises(ListFileError, match=rf"my\.toml:7: .*{said}"):
        expand(table(rule(typo, CastPolicy.FP32)))


def test_a_dotted_name_of_a_module_that_is_not_imported_waits_and_imports_nothing(folder: Path) -> None:
    package(folder, "waiting_pkg", losses="def focal(x): return x\n")
    waiting, absent = rule("waiting_pkg.losses.focal"), rule("no_such_package_at_all.focal")
    expansion = expand(table(waiting, absent))
    assert expansion.deferred == (waiting, absent)
    assert not any(name.startswith(("waiting_pkg", "no_such")) for name in sys.modules)
    losses = importlib.import_module("waiting_pkg.losses")
    located = locate(waiting)
    assert located is not None
    assert (located[0].parent, located[0].original) == (losses, losses.focal)


# -- whose names are rebound --


def test_torch_keeps_its_own_names_but_for_layers_and_distributions() -> None:
    own = "torch torch.functional torch.nn.functional torch._refs torch._dynamo.utils autoamp autoamp.core"
    others = (
        "torch.nn.attention torch.nn.modules.activation torch.distributions.bernoulli torchvision.ops autoamped apex "
        "zoo __main__"
    )
    assert all(map(owns_its_names, own.split()))
    assert not any(map(owns_its_names, others.split()))


def test_an_in_place_form_without_a_twin_is_not_derived() -> None:
    autoamp.init(lists={"extends": [], "fp32": ["normal"]}, device_type="cpu", dtype=torch.float16)
    values = torch.zeros(64).half()
    assert values.normal_() is values
    assert values.abs().sum() > 0
