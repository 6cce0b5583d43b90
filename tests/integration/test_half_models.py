"""Programs for fp32 at O2 and O3, unedited: they run, and their losses are those of O0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import autoamp
from tests.integration.half_model_programs import PROGRAMS, Model, linear

STEPS = 4
# Half precision rounds values of about 1 by 2**-9 (bf16) or 2**-12 (fp16); a program rounds some tens of times.
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.004}
# Whose steps are large, so that what is rounded grows from step to step.
STEEP = {"flow_with_slogdet": 1e-4}
# Dynamo puts `x[i] = y` into its graph without asking for the method.
NOT_COMPILED = {"detector_targets"}

Around = Callable[[nn.Module], Callable[..., Any]]


def losses(name: str, level: str, half: torch.dtype, around: Around = lambda model: model) -> list[float]:
    model, inputs = PROGRAMS[name]()
    optimizer = torch.optim.SGD(model.parameters(), STEEP.get(name, 1e-2))
    scale = 1.0 if level == "O0" else 128.0
    autoamp.initialize(model, optimizer, opt_level=level, dtype=half, device_type="cpu", verbosity=0, loss_scale=scale)
    call, found = around(model), []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        outputs = call(*inputs)
        assert outputs.dtype is torch.float32
        loss = outputs.square().mean()
        with autoamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def compare(name: str, level: str, half: torch.dtype, around: Around = lambda model: model) -> None:
    expected = losses(name, "O0", half)
    autoamp.current_handle().deactivate()
    tolerance = TOLERANCE[half] * (2 if level == "O3" else 1)
    assert losses(name, level, half, around) == pytest.approx(expected, rel=tolerance, abs=tolerance * expected[0])


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_for_fp32_trains_as_a_half_model(name: str, half: torch.dtype, level: str) -> None:
    compare(name, level, half)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NOT_COMPILED])
def test_it_trains_compiled(name: str) -> None:
    torch.compiler.reset()
    compare(name, "O2", torch.bfloat16, lambda model: torch.compile(model, backend="aot_eager"))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["lstm_with_fp32_states", "graph_attention", "fft_block", "flow_with_slogdet"])
def test_it_trains_in_a_checkpoint(name: str, use_reentrant: bool) -> None:
    def around(model: nn.Module) -> Callable[..., Any]:
        # The reentrant one needs an input that requires gradients.
        return lambda x: torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)

    compare(name, "O2", torch.bfloat16, around)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_inside_the_model_computes_the_same_again(use_reentrant: bool) -> None:
    def block(net: Any, x: Any) -> Any:
        return torch.linalg.slogdet(net.w)[1] + net.layer(x + torch.ones(16))

    def around(model: nn.Module) -> Callable[..., Any]:
        model.function = lambda net, x: net.out(  # type: ignore[assignment]
            torch.utils.checkpoint.checkpoint(block, net, net.first(x), use_reentrant=use_reentrant)
        )
        return model

    PROGRAMS["checkpointed"] = lambda: (
        torch.manual_seed(0)
        and Model(
            lambda net, x: net.out(block(net, net.first(x))),
            first=linear(), layer=linear(), out=linear(), w=nn.Parameter(torch.eye(4)),
        ),
        (torch.ones(4, 16),),
    )  # fmt: skip
    try:
        compare("checkpointed", "O2", torch.bfloat16, around)
        assert losses("checkpointed", "O2", torch.bfloat16, around) == losses("checkpointed", "O2", torch.bfloat16)
    finally:
        del PROGRAMS["checkpointed"]
