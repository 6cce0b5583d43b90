"""Every OpInfo of torch under autoamp, in both half dtypes: see `checks` for what must hold."""

from __future__ import annotations

import itertools
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import autoamp

from .cases import HALVES, OPS, Call, run, samples, variants
from .checks import active, sweep

pytestmark = pytest.mark.sweep

GAPS: dict[str, str] = tomllib.loads(Path(__file__).with_name("known_gaps.toml").read_text(encoding="utf-8"))["gaps"]


def test_the_sweep_is_whole() -> None:
    assert len(OPS) > 550
    assert GAPS.keys() <= OPS.keys()
    assert len(GAPS) < 12
    assert all(len(reason) > 20 for reason in GAPS.values())


@pytest.mark.parametrize("name", OPS)
def test_op(name: str) -> None:
    found = [remark for half in HALVES for remark in sweep(name, half, OPS[name])]
    if name in GAPS:
        assert found, f"{name} has no gap any more; take it out of known_gaps.toml"
    else:
        assert not found, "\n".join(found)


def _raised(function: Any, sample: Any) -> Exception | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(sample.input, *sample.args, **sample.kwargs)
        except Exception as error:  # whatever torch raises is to be compared
            return error
    return None


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.error_inputs_func is not None])
def test_errors_are_torchs_own(name: str) -> None:
    op = OPS[name]
    torch.manual_seed(0)
    inputs = [item.sample_input for item in op.error_inputs("cpu")]
    function = next(iter(variants(op))).function
    control = [_raised(function, sample) for sample in inputs]
    with active(torch.float16):
        found = [_raised(function, sample) for sample in inputs]
    for ours, theirs in zip(found, control, strict=True):
        # Some calls go through with autoamp: mixed dtypes are a mistake no more.
        if ours is not None:
            assert theirs is not None, f"raised {ours!r}"
            assert type(ours) is type(theirs), f"{ours!r} where torch has {theirs!r}"


def _eligible(name: str) -> bool:
    """Ops that a project may well put under a policy of its own: public, and of the functional kind."""
    op = OPS[name]
    last = op.name.split(".")[-1]
    spaces = (torch, torch.nn.functional, torch.linalg, torch.special, torch.fft)
    return not last.startswith("_") and any(getattr(space, last, None) is op.op for space in spaces)


def _moved(before: Call, after: tuple[Any, ...]) -> list[bool]:
    pairs = zip(before.leaves, after, strict=True)
    return [
        not torch.equal(a.to(torch.float64).nan_to_num(), b.detach().to(torch.float64).nan_to_num())
        for a, b in pairs
        if isinstance(a, Tensor) and a.layout is torch.strided and not a.is_complex() and a.shape == b.shape
    ]


@pytest.mark.parametrize("policy", ["fp16", "fp32"])
@pytest.mark.parametrize("name", [name for name in OPS if _eligible(name)])
def test_a_project_may_put_an_op_anywhere(name: str, policy: str) -> None:
    """Under a policy that is not its own an op still writes to what it writes to, and to nothing else."""
    op = OPS[name]
    function = next(iter(variants(op))).function
    cases = [call for call, _ in itertools.islice(samples(op), 4)]
    control = [run(function, call) for call in cases]
    half = [run(function, call.cast(lambda _: torch.float16)) for call in cases]
    handle = autoamp.init(
        device_type="cpu", dtype=torch.float16, lists={"extends": [], policy: [op.name.split(".")[-1]]}
    )
    found = [run(function, call) for call in cases]
    handle.deactivate()
    for call, ours, theirs, in_half in zip(cases, found, control, half, strict=True):
        if ours.error is not None:
            lacks_half = policy == "fp16" and in_half.error is not None
            assert theirs.error is not None or lacks_half, repr(ours.error)
            continue
        if theirs.error is None:
            assert _moved(call, ours.leaves) == _moved(call, theirs.leaves)
            floating = [tensor for tensor in tree_flatten(theirs.result)[0] if isinstance(tensor, Tensor)]
            kinds = [tensor.dtype.is_floating_point for tensor in floating]
            assert [tensor.dtype.is_floating_point for tensor in ours.tensors] == kinds
