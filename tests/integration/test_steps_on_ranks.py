"""Programs on two processes over gloo whose steps concern more than one block, optimizer or evaluation."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.integration.spawned import on_ranks

pytestmark = pytest.mark.processes

HALF, BF16 = torch.float16, torch.bfloat16


@contextlib.contextmanager
def ended() -> Iterator[None]:
    try:
        yield
    finally:
        if (handle := autoamp.current_handle()) is not None:
            handle.deactivate()


def initialized(models: Any, optimizers: Any, level: str, dtype: torch.dtype = HALF, **options: Any) -> None:
    autoamp.initialize(
        models, optimizers, opt_level=level, dtype=dtype, device_type="cpu", verbosity=0, **options
    )  # fmt: skip


def values(*models: nn.Module) -> list[Tensor]:
    return [param.detach().float().clone() for model in models for param in model.parameters()]


def gan(level: str, scale: Any = None) -> list[Tensor]:
    """Train a generator by a critic whose gradients of its own step are still there."""
    torch.manual_seed(0)
    critic, generator = nn.Linear(16, 1), nn.Linear(4, 16)
    opt_c, opt_g = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, generator))
    with ended():
        if level != "fp32":
            initialized([critic, generator], [opt_c, opt_g], level, num_losses=2, loss_scale=scale)
        wrapped, made = DistributedDataParallel(critic), DistributedDataParallel(generator)

        def back(loss: Tensor, optimizer: Any, number: int) -> None:
            block = contextlib.nullcontext(loss) if level == "fp32" else autoamp.scale_loss(loss, optimizer, number)
            with block as scaled:
                scaled.backward()

        for step in range(3):
            draw = torch.Generator().manual_seed(step * 2 + dist.get_rank())
            x, z = torch.randn(8, 16, generator=draw), torch.randn(8, 4, generator=draw)
            fake = made(z)
            opt_c.zero_grad()
            real = torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])
            back(F.binary_cross_entropy_with_logits(wrapped(torch.cat([x, fake.detach()])).float(), real), opt_c, 0)
            before = [param.grad.float().clone() for group in opt_c.param_groups for param in group["params"]]
            opt_c.step()
            opt_g.zero_grad()
            back(F.binary_cross_entropy_with_logits(wrapped(fake).float(), torch.ones(8, 1)), opt_g, 1)
            opt_g.step()
        return [*values(critic, generator), *before]


def apart(level: str) -> bool:
    """Whether a block of another model leaves the gradients of this one where they are, for whoever reads them."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
    with ended():
        initialized([first, second], optimizers, level, loss_scale=8.0)
        wrapped = [DistributedDataParallel(net) for net in (first, second)]
        for net, optimizer in zip(wrapped, optimizers, strict=True):
            with autoamp.scale_loss(net(torch.ones(2, 4)).float().mean(), optimizer) as scaled:
                scaled.backward()
        return all(param.grad is not None for net in (first, second) for param in net.parameters())


def zeroed(dtype: torch.dtype, clear: Callable[[Any, Any], None]) -> list[Tensor]:
    """Train at O2 without a loss scale and without blocks."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ended():
        initialized(model, optimizer, "O2", dtype, loss_scale=1.0)
        wrapped = DistributedDataParallel(model)
        for step in range(4):
            clear(optimizer, wrapped)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 2 + dist.get_rank()))
            wrapped(x).float().square().mean().backward()
            optimizer.step()
        return values(model)


CLEARS: dict[str, Callable[[Any, Any], None]] = {
    "none": lambda optimizer, model: optimizer.zero_grad(),
    "zeros": lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
    "model's zeros": lambda optimizer, model: model.zero_grad(set_to_none=False),
}


class Ascent(torch.optim.SGD):
    """Evaluates its closure, climbs, evaluates it again and steps from where it began, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in params]
        for param in params:
            param.add_(param.grad, alpha=0.01)
        with torch.enable_grad():
            closure()
        for param, value in zip(params, before, strict=True):
            param.copy_(value)
        super().step()
        return loss


CLOSURES: dict[str, Callable[[Any], Any]] = {
    "SAM": lambda params: Ascent(params, lr=0.1),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
}


def closures(level: str, name: str) -> list[tuple[bool, float, list[float]]]:
    """Step by closures, whose loss is inf on one rank alone in the third of five steps."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = CLOSURES[name](model.parameters())
    with ended():
        initialized(model, optimizer, level)
        wrapped, told = DistributedDataParallel(model), []
        handle: Any = autoamp.current_handle()
        for step in range(5):
            draw = torch.Generator().manual_seed(step * 2 + dist.get_rank())
            x, y = torch.randn(8, 16, generator=draw), torch.randint(4, (8,), generator=draw)
            if step == 2 and dist.get_rank() == 1:
                x[0, 0] = torch.inf

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(wrapped(x).float(), y)
                with autoamp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                return loss

            optimizer.step(closure)
            told.append((handle.last_step_skipped, handle.loss_scale, model.weight.detach().flatten().tolist()))
        return told


def sync_over(loss_scale: Any) -> Any:
    """Return the skips of stages, of which one has nan in its second step, or what they are refused with."""
    with ended():
        handle: Any = autoamp.init(
            device_type="cpu", dtype=BF16, on_nonfinite="skip", loss_scale=loss_scale, lists={"extends": []}
        )
        handle.sync_over(dist.group.WORLD, replicas=1)
        stage = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((2, 4), torch.nan if step == 1 and dist.get_rank() == 1 else 1.0)
            with handle.scale_loss(stage(x).square().mean(), optimizer) as scaled:
                scaled.backward()
            try:
                optimizer.step()
            except autoamp.UsageError as error:
                return str(error)
        return handle.skipped_steps


def sharded_states(order: str, kind: Any) -> Any:
    """Train at O2 by a `ZeroRedundancyOptimizer` that is made before or after `initialize`."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)

    def made() -> Any:
        return ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.1)

    with ended():
        optimizer: Any = made() if order == "before" else None
        try:
            initialized(model, optimizer, "O2")
        except autoamp.UsageError as error:
            return str(error), model.weight.dtype, autoamp.current_handle() is None
        wrapped = DistributedDataParallel(model)
        optimizer, before = made(), model.weight.detach().clone()
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            with autoamp.scale_loss(wrapped(x).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        return bool((model.weight != before).any()), values(model)


def found_by_rank() -> dict[Any, Any]:
    found: dict[Any, Any] = {("gan", level): gan(level) for level in ("fp32", "O1", "O2")}
    found["gan", "static"] = gan("O2", 1.0)
    found["apart"] = [apart(level) for level in ("O1", "O2")]
    for dtype, name in itertools.product((HALF, BF16), CLEARS):
        found[dtype, name] = zeroed(dtype, CLEARS[name])
    for level, name in itertools.product(("O1", "O2"), CLOSURES):
        found[level, name] = closures(level, name)
    found["sync_over"] = [sync_over(scale) for scale in (None, "dynamic")]
    for order, kind in itertools.product(("before", "after"), (torch.optim.SGD, torch.optim.AdamW)):
        found["zero", order, kind.__name__] = sharded_states(order, kind)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two processes found."""
    return on_ranks(tmp_path_factory, 2, found_by_rank)


@pytest.mark.parametrize("how", ["O1", "O2", "static"])
def test_a_generator_trains_by_a_critic_that_has_gradients(ranks: list[Any], how: str) -> None:
    plain = ranks[0]["gan", "fp32"]
    for found in ranks:
        torch.testing.assert_close(found["gan", how], plain, atol=5e-3, rtol=0.05)
    torch.testing.assert_close(ranks[0]["gan", how], ranks[1]["gan", how], atol=0.0, rtol=0.0)


def test_a_block_leaves_the_gradients_of_other_models_where_they_are(ranks: list[Any]) -> None:
    assert [found["apart"] for found in ranks] == [[True, True]] * 2


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("name", CLEARS)
def test_steps_without_blocks_are_alike_however_gradients_were_cleared(
    ranks: list[Any], dtype: torch.dtype, name: str
) -> None:
    for found in ranks:
        torch.testing.assert_close(found[dtype, name], ranks[0][dtype, "none"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", CLOSURES)
def test_the_inf_loss_of_one_rank_skips_the_closure_step_of_all(ranks: list[Any], level: str, name: str) -> None:
    one, other = (found[level, name] for found in ranks)
    assert one == other
    assert [skipped for skipped, *_ in one] == [False, False, True, False, False]
    # As after any skip, however many evaluations there were.
    assert [scale for _, scale, _ in one] == [65536.0, 65536.0, 32768.0, 32768.0, 32768.0]
    assert one[2][2] == one[1][2] != one[3][2]


def test_steps_that_ranks_are_to_agree_on_are_not_skipped_by_one_of_them(ranks: list[Any]) -> None:
    for found in ranks:
        refused, skips = found["sync_over"]
        assert "choose on_nonfinite='raise', or loss_scale='dynamic'" in refused
        assert skips == 1


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_an_optimizer_that_steps_by_another_one_is_made_after_its_model_was_set_up(ranks: list[Any], kind: str) -> None:
    for found in ranks:
        told, dtype, is_over = found["zero", "before", kind]
        assert "make it after initialize(model, ...)" in told
        assert (dtype, is_over) == (torch.float32, True)
        assert found["zero", "after", kind][0]
    torch.testing.assert_close(*(found["zero", "after", kind][1] for found in ranks), atol=0.0, rtol=0.0)
