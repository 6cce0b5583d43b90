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


def gan(level: str, how: str = "") -> Any:
    """Train a generator by a critic whose gradients of its own step are still there, unless they are cleared.

    Returns the values of all, or the note on torch's error.
    """
    torch.manual_seed(0)
    critic, generator = nn.Linear(16, 1), nn.Linear(4, 16)
    opt_c, opt_g = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, generator))
    with ended():
        if level != "fp32":
            initialized([critic, generator], [opt_c, opt_g], level, num_losses=2)
        wrap = autoamp.parallel.DistributedDataParallel if how == "apex" else DistributedDataParallel
        wrapped, made = wrap(critic), wrap(generator)

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
            opt_c.step()
            opt_g.zero_grad()
            if how == "cleared":
                opt_c.zero_grad()
            loss = F.binary_cross_entropy_with_logits(wrapped(fake).float(), torch.ones(8, 1))
            try:
                back(loss, opt_g, 1)
            except RuntimeError as error:
                return " ".join(error.__notes__)
            opt_g.step()
        return values(critic, generator)


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


def sync_over(loss_scale: Any, replicas: int | None) -> Any:
    """Return the skips of stages, of which one has nan in its second step, or what they are refused with.

    Without a number of replicas all ranks have nan in it, as where the program reduces its gradients.
    """
    with ended():
        handle: Any = autoamp.init(
            device_type="cpu", dtype=BF16, on_nonfinite="skip", loss_scale=loss_scale, lists={"extends": []}
        )
        handle.sync_over(dist.group.WORLD, replicas=replicas)
        stage = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((2, 4), torch.nan if step == 1 and (replicas is None or dist.get_rank() == 1) else 1.0)
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


def left_scaled(level: str, views: bool) -> str:
    """Let a critic step by what the loss of a generator has left in its gradients, and return what is told."""
    critic, generator = nn.Linear(16, 1), nn.Linear(4, 16)
    opt_c, opt_g = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, generator))
    with ended():
        initialized([critic, generator], [opt_c, opt_g], level, loss_scale=128.0)
        wrapped, made = (DistributedDataParallel(net, gradient_as_bucket_view=views) for net in (critic, generator))
        with autoamp.scale_loss(wrapped(made(torch.ones(2, 4))).float().mean(), opt_g) as scaled:
            scaled.backward()
        opt_g.step()
        try:
            opt_c.step()
        except autoamp.UsageError as error:
            return str(error)
    return ""


def found_by_rank() -> dict[Any, Any]:
    ways = [("fp32", ""), ("O1", ""), ("O2", ""), ("O2", "cleared"), ("O2", "apex")]
    found: dict[Any, Any] = {("gan", *way): gan(*way) for way in ways}
    for level, name in itertools.product(("O1", "O2"), CLOSURES):
        found[level, name] = closures(level, name)
    found["sync_over"] = [sync_over(*given) for given in ((None, 1), ("dynamic", 1), (None, None))]
    for order, kind in itertools.product(("before", "after"), (torch.optim.SGD, torch.optim.AdamW)):
        found["zero", order, kind.__name__] = sharded_states(order, kind)
    for level, views in itertools.product(("O1", "O2"), (False, True)):
        found["left", level, views] = left_scaled(level, views)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two processes found."""
    return on_ranks(tmp_path_factory, 2, found_by_rank)


@pytest.mark.parametrize("way", [("O1", ""), ("O2", "cleared"), ("O2", "apex")])
def test_a_generator_trains_by_a_critic(ranks: list[Any], way: tuple[str, str]) -> None:
    for found in ranks:
        torch.testing.assert_close(found["gan", *way], ranks[0]["gan", "fp32", ""], atol=5e-3, rtol=0.05)
    torch.testing.assert_close(ranks[0]["gan", *way], ranks[1]["gan", *way], atol=0.0, rtol=0.0)


def test_a_critic_whose_gradients_torchs_reducer_refuses_is_told_with_what_helps(ranks: list[Any]) -> None:
    # The remedies are those of the test above.
    for found in ranks:
        assert "zero_grad() of the critic's optimizer before the generator's loss" in found["gan", "O2", ""]
        assert "wrap the model in autoamp.parallel.DistributedDataParallel" in found["gan", "O2", ""]


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
        refused, *skips = found["sync_over"]
        assert "choose on_nonfinite='raise', or loss_scale='dynamic'" in refused
        assert skips == [1, 1]


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_an_optimizer_that_steps_by_another_one_is_made_after_its_model_was_set_up(ranks: list[Any], kind: str) -> None:
    for found in ranks:
        told, dtype, is_over = found["zero", "before", kind]
        assert "make it after initialize(model, ...)" in told
        assert (dtype, is_over) == (torch.float32, True)
        assert found["zero", "after", kind][0]
    torch.testing.assert_close(*(found["zero", "after", kind][1] for found in ranks), atol=0.0, rtol=0.0)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_a_reducer_leaves_scaled_are_refused(ranks: list[Any], level: str, views: bool) -> None:
    """The reducer writes them at the end of the pass, after what was asked for earlier has looked."""
    for found in ranks:
        assert found["left", level, views].startswith("SGD would use gradients that are multiplied by the loss scale")
