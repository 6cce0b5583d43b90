"""Which backward passes `auto_scale()` scales, and which it leaves to the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import autoamp
from autoamp.core import AutoScale, local_of, runtime_of
from tests.core.auto_scaling.programs import NO_CASTS, gradients, make, train_step


def test_the_scale_of_a_half_loss_is_in_its_range(scaling: AutoScale) -> None:
    layer = nn.Linear(2, 2).half()
    _optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    seen: list[Tensor] = []
    layer.bias.register_hook(seen.append)
    assert root_gradient(layer(torch.ones(1, 2).half()).sum()) == 2.0**15
    layer.zero_grad()
    seen.clear()
    for count in (1, 2):
        (layer(torch.ones(1, 2).half()) * 2.0**-5).sum().backward()
        assert torch.equal(layer.bias.grad, torch.full((2,), count * 2.0**-5).half())
    assert [gradient.dtype for gradient in seen] == [torch.float16] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_flat_parameters_of_several_ranks_are_refused(ranks: int, fake_ranks: Callable[[int], None]) -> None:
    fake_ranks(ranks)
    autoamp.init(**NO_CASTS).auto_scale()
    model, _optimizer, x = make()
    # As FullyShardedDataParallel marks its parameters.
    model[0].weight._is_flat_param = True  # type: ignore[assignment]
    loss = model(x).sum()
    if ranks == 1:
        loss.backward()
    else:
        with pytest.raises(autoamp.UsageError, match=r"shards of flat parameters.*use bf16"):
            loss.backward()
    assert bool(gradients(model)) is (ranks == 1)


@pytest.mark.usefixtures("one_process")
def test_shards_of_parameters_are_checked(handle: autoamp.Handle, scaling: AutoScale) -> None:
    """The pass reaches whole parameters, from which torch reduces gradients onto shards."""
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = local_of(model.weight).clone()
    for factor, skipped in ((float("inf"), 1), (1.0, 1)):
        train_step(optimizer, model(torch.ones(1, 4)).sum() * factor)
        assert handle.skipped_steps == skipped
        assert torch.equal(local_of(model.weight), before - (0.5 if factor == 1.0 else 0.0))
    assert handle.loss_scale == 2.0**15


@pytest.mark.filterwarnings("error")
def test_an_optimizer_of_half_parameters_is_guarded_without_a_warning(
    handle: autoamp.Handle, scaling: AutoScale
) -> None:
    """It is the program's, which may never run a pass of its parameters."""
    optimizer = torch.optim.Adam(nn.Linear(2, 2).half().parameters(), eps=1e-8)
    assert runtime_of(handle).optimizers.guard_of(optimizer) is not None


def root_gradient(root: Tensor, gradient: Tensor | None = None, run: Callable[..., Any] = Tensor.backward) -> float:
    """Run a backward pass, and return the first element of the gradient with which it began."""
    seen: list[float] = []
    root.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0].flatten()[0].item()))  # type: ignore[union-attr]
    run(root, gradient)
    return seen[0]


@pytest.mark.filterwarnings("ignore:`grad_variables` argument is deprecated")
@pytest.mark.parametrize(
    ("run", "factor"),
    [
        (lambda root, gradient: torch.autograd.backward(root, gradient), 2.0**16),
        (lambda root, gradient: torch.autograd.backward((root,), (gradient,)), 2.0**16),
        (lambda root, gradient: torch.autograd.backward([root], grad_variables=[gradient]), 2.0**16),
        (lambda root, gradient: torch.autograd.backward(root, gradient, create_graph=True), 1.0),
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_all_spellings_of_a_pass_are_scaled(scaling: AutoScale, run: Callable[..., Any], factor: float) -> None:
    model, optimizer, x = make()
    assert root_gradient(model(x), torch.full((5, 2), 3.0), run) == 3.0 * factor
    assert model[2].bias.grad.tolist() == [15.0, 15.0]
    assert not model[2].bias.grad.requires_grad or factor == 1.0
    optimizer.zero_grad()


def test_passes_that_need_no_scale_are_left_alone(handle: autoamp.Handle, scaling: AutoScale) -> None:
    x = torch.ones(2, requires_grad=True)
    model, _optimizer, data = make()
    assert root_gradient(model(data).sum()) == 2.0**16
    assert root_gradient(model(data), torch.full((5, 2), 3.0)) == 3.0 * 2.0**16
    # No optimizer steps it.
    assert root_gradient(x.sum()) == 1.0
    assert torch.equal(torch.autograd.grad(x.sum(), x)[0], torch.ones(2))
    handle.deactivate()
    # bf16 has no loss scale.
    bf16 = autoamp.init(device_type="cpu", dtype=torch.bfloat16)
    with bf16.auto_scale():
        assert root_gradient(model(data).float().sum()) == 1.0
    assert bf16.loss_scale == 1.0


def test_torch_s_own_errors(scaling: AutoScale) -> None:
    model, _optimizer, x = make()
    for wrong, message in (
        (lambda: model(x).backward(), "grad can be implicitly created only for scalar outputs"),
        (lambda: model(x).sum().mul(1j).backward(), "only for real scalar outputs"),
        (lambda: x.sum().backward(), "does not require grad"),
        (lambda: model(x).backward(torch.ones(3)), "Mismatch in shape"),
        (lambda: model(x)[:0].backward(), "grad can be implicitly created only for scalar outputs"),
        (
            lambda: torch.autograd.backward([model(x).sum()], [1.0]),
            "gradients can be either Tensors or None, but got float",
        ),
        (lambda: torch.autograd.backward([model(x).sum()] * 2, [torch.ones(())]), "got 2 tensors and 1 gradients"),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
            wrong()
        assert not gradients(model)


def test_a_pass_from_an_edge_of_the_graph_is_left_alone(scaling: AutoScale) -> None:
    model, _optimizer, x = make()
    edge = torch.autograd.graph.get_gradient_edge(model(x))
    torch.autograd.backward([edge], [torch.ones(5, 2)])
    assert model[2].bias.grad.tolist() == [5.0, 5.0]


def test_blocks_of_the_program_are_its_own(handle: autoamp.Handle, scaling: AutoScale) -> None:
    model, optimizer, x = make()
    for optimizers, after in ((optimizer, 5.0), ([], 5.0 * 2.0**16)):
        optimizer.zero_grad()
        with handle.scale_loss(model(x).sum(), optimizers) as scaled_loss:
            scaled_loss.backward()
            assert float(model[2].bias.grad[0]) == 5.0 * 2.0**16
        assert float(model[2].bias.grad[0]) == after
    train_step(optimizer, model(x).sum())
    assert float(model[2].bias.grad[0]) == 5.0
    assert scaling.yielded_to is None


@pytest.mark.parametrize("before", [True, False])
def test_auto_scale_yields_to_a_grad_scaler(handle: autoamp.Handle, before: bool) -> None:
    model, optimizer, x = make()
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if before else None
    scaling = handle.auto_scale()
    torch.amp.GradScaler("cpu", enabled=False).scale(torch.ones(()))
    grad_scaler = grad_scaler or torch.amp.GradScaler("cpu", init_scale=4.0)
    # One that is there, and scales nothing, leaves the scaling here.
    train_step(optimizer, model(x).sum())
    assert float(model[2].bias.grad[0]) == 5.0
    assert scaling.yielded_to is None
    assert scaling.has_unused_scaler is not before
    optimizer.zero_grad()
    grad_scaler.scale(model(x).sum()).backward()
    assert scaling.yielded_to == "torch.amp.GradScaler"
    assert not scaling.has_unused_scaler
    assert float(model[2].bias.grad[0]) == 20.0
    grad_scaler.step(optimizer)
    grad_scaler.update()
    assert float(model[2].bias.grad[0]) == 5.0


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_auto_scale_yields_to_autocast(scaling: AutoScale) -> None:
    with torch.autocast("cpu", enabled=False):
        pass
    # For an evaluation, and for another device.
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        pass
    with torch.autocast("cuda", dtype=torch.bfloat16):
        pass
    assert scaling.yielded_to is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert scaling.yielded_to == "torch.autocast"
    scaling.stop()
    # Another training begins anew.
    assert scaling.start().yielded_to is None


def test_master_weights_need_scale_loss() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    autoamp.initialize(layer, optimizer, opt_level="O2", dtype=torch.float16, verbosity=0)
    handle: Any = autoamp.current_handle()
    with pytest.raises(autoamp.UsageError, match="master weights; use scale_loss"):
        handle.auto_scale()
