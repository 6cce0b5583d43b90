"""Gradients that are multiplied by the loss scale never reach a step: of another optimizer, or after the block."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear
from torch.utils import checkpoint

import autoamp
from autoamp.errors import UsageError
from autoamp.fp16_utils import FP16_Optimizer

pytestmark = pytest.mark.filterwarnings("error")


@contextlib.contextmanager
def initialized(dtype: torch.dtype = torch.float16) -> Iterator[autoamp.Handle]:
    handle = autoamp.init(device_type="cpu", dtype=dtype)
    try:
        yield handle
    finally:
        handle.deactivate()


@pytest.fixture
def handle() -> Iterator[autoamp.Handle]:
    with initialized() as handle:
        yield handle


def loss_of(*models: Linear) -> Tensor:
    torch.manual_seed(0)
    value = torch.randn(8, 4)
    for model in models:
        value = model(value)
    return value.float().square().mean()


def weights(*models: Linear) -> list[Tensor]:
    return [param.detach().clone() for model in models for param in model.parameters()]


def assert_same(before: list[Tensor], after: list[Tensor]) -> None:
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_left_in_parameters_of_no_optimizer_are_refused_to_a_later_one(
    handle: autoamp.Handle, clears: bool
) -> None:
    body, head = Linear(4, 4), Linear(4, 4)
    of_head = torch.optim.SGD(head.parameters(), lr=0.1)
    with handle.scale_loss(loss_of(body, head), of_head) as scaled:
        scaled.backward()
    of_head.step()
    of_head.zero_grad()
    of_all = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    if clears:
        of_all.zero_grad()
    before = weights(body)
    refusal = contextlib.nullcontext() if clears else pytest.raises(UsageError, match="add to gradients that are mult")
    with refusal, handle.scale_loss(loss_of(body, head), of_all) as scaled:
        scaled.backward()
    if clears:
        of_all.step()
        assert not torch.equal(before[0], body.weight)
        assert float((before[0] - body.weight.detach()).abs().max()) < 1.0
    else:
        with pytest.raises(UsageError, match="use gradients that are multiplied"):
            of_all.step()
        assert_same(before, weights(body))


@pytest.mark.parametrize("joins", ["an optimizer", "a group"])
def test_parameters_that_an_optimizer_got_later_are_its_own(handle: autoamp.Handle, joins: str) -> None:
    body, head = Linear(4, 4), Linear(4, 4)
    of_head = torch.optim.SGD(head.parameters(), lr=0.1)
    with handle.scale_loss(loss_of(body, head), of_head) as scaled:
        scaled.backward()
    of_head.step()
    for module in (body, head):
        module.zero_grad()
    if joins == "an optimizer":
        of_body = torch.optim.SGD(body.parameters(), lr=0.1)
    else:
        of_body = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        of_body.add_param_group({"params": list(body.parameters())})
    # The first loss reaches the body too, which the second block unscales.
    for _ in range(2):
        first, second = loss_of(body, head), loss_of(body)
        with handle.scale_loss(first, of_head) as one, handle.scale_loss(second, of_body) as two:
            one.backward()
            two.backward()
        for optimizer in (of_body, of_head):
            optimizer.step()
            optimizer.zero_grad()
    assert all(float(weight.abs().max()) < 2.0 for weight in weights(body, head))


@pytest.mark.parametrize("made", ["before init", "before the block", "before the block, guarded"])
def test_a_forgotten_optimizer_is_refused(made: str) -> None:
    first, second = Linear(4, 4), Linear(4, 4)
    one = torch.optim.SGD(first.parameters(), lr=0.1)
    two = torch.optim.SGD(second.parameters(), lr=0.1) if made == "before init" else None
    with initialized() as handle:
        two = two or torch.optim.SGD(second.parameters(), lr=0.1)
        if made.endswith("guarded"):
            with handle.scale_loss(loss_of(second), two) as scaled:
                scaled.backward()
            two.step()
            two.zero_grad()
        before = weights(second)
        with handle.scale_loss(loss_of(first, second), one) as scaled:
            scaled.backward()
        one.step()
        with pytest.raises(UsageError, match=r"SGD would use gradients .* 65536, those of 2 parameters,.*scale_loss"):
            two.step()
        assert_same(before, weights(second))
        # The remedy.
        one.zero_grad(), two.zero_grad()
        with handle.scale_loss(loss_of(first, second), [one, two]) as scaled:
            scaled.backward()
        one.step(), two.step()
        assert not torch.equal(before[0], second.weight)


@pytest.mark.parametrize("there", ["zeros", "a micro-batch"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_backward_pass_after_its_block_is_refused(there: str, level: str) -> None:
    model = Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = autoamp.initialize(
        model, optimizer, opt_level=level, dtype=torch.float16, device_type="cpu", loss_scale=128.0, verbosity=0
    )
    with autoamp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    if there == "zeros":
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    before, gradient = weights(model), model.weight.grad.clone()
    with autoamp.scale_loss(loss_of(model), optimizer) as scaled:
        pass
    with pytest.raises(
        UsageError,
        match=r"loss scale 128: .*after its scale_loss block of SGD had ended. Indent it into the with block",
    ):
        scaled.backward()
    assert torch.equal(model.weight.grad, gradient)
    assert_same(before, weights(model))


@pytest.mark.parametrize("before", ["nothing", "a block that an error ended", "a pass that came too late"])
def test_a_backward_pass_of_the_unscaled_loss_is_refused(handle: autoamp.Handle, before: str) -> None:
    model = Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if before == "a block that an error ended":
        with contextlib.suppress(KeyError), handle.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
            raise KeyError
    elif before == "a pass that came too late":
        with pytest.warns(UserWarning, match="no parameter"), handle.scale_loss(loss_of(model), optimizer) as scaled:
            pass
        with pytest.raises(UsageError, match="had ended"):
            scaled.backward()
    optimizer.zero_grad()
    with (
        pytest.raises(UsageError, match=r"loss.backward\(\) was called inside the scale_loss block of SGD.* Call "),
        handle.scale_loss(loss := loss_of(model), optimizer),
    ):
        loss.backward()
    optimizer.zero_grad()
    with handle.scale_loss(loss := loss_of(model), optimizer) as scaled:
        # A penalty, say, may run the loss backward as well.
        loss.backward(retain_graph=True)
        scaled.backward()


def test_gradients_of_inputs_may_be_asked_for_after_the_block(handle: autoamp.Handle) -> None:
    model = Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(2, 4, requires_grad=True)
    with handle.scale_loss(model(inputs).float().square().mean(), optimizer) as scaled:
        scaled.backward(retain_graph=True)
    gradient, weight = torch.autograd.grad(scaled, [inputs, model.weight])
    assert gradient.abs().sum() > 0
    assert torch.allclose(weight / 65536.0, model.weight.grad, rtol=1e-3)


def test_delayed_gradients_and_an_open_block_take_a_late_pass_of_the_same_scale(handle: autoamp.Handle) -> None:
    model = Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with handle.scale_loss(loss_of(model), optimizer, delay_unscale=True) as late:
        pass
    late.backward(retain_graph=True)
    with handle.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        late.backward()
    expected = Linear(4, 4)
    expected.load_state_dict(model.state_dict())
    loss_of(expected).backward()
    assert torch.allclose(model.weight.grad, 3.0 * expected.weight.grad)


@pytest.mark.parametrize(
    "zero",
    [
        lambda model: model.zero_grad(),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: [param.grad.data.zero_() for param in model.parameters() if param.grad is not None],
        lambda model: [setattr(param, "grad", None) for param in model.parameters()],
        lambda model: torch._foreach_zero_([param.grad for param in model.parameters() if param.grad is not None]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_networks_of_which_one_trains_through_the_other(zero: Callable[[Any], Any], dtype: torch.dtype) -> None:
    def train(handle: autoamp.Handle | None) -> list[Tensor]:
        torch.manual_seed(1)
        generator, discriminator = Linear(4, 4), Linear(4, 4)
        ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator))

        def backward(loss: Tensor, optimizer: Any) -> None:
            if handle is None:
                loss.backward()
                return
            with handle.scale_loss(loss, optimizer) as scaled:
                scaled.backward()

        loss_of(generator, discriminator).backward()
        for _ in range(3):
            zero(discriminator)
            backward(loss_of(discriminator), theirs)
            backward(loss_of(generator, discriminator), [theirs])
            theirs.step()
            zero(generator)
            # Leaves scaled gradients in the discriminator.
            backward(loss_of(generator, discriminator), ours)
            ours.step()
        return weights(generator, discriminator)

    expected = train(None)
    with initialized(dtype) as handle, handle.disable_casts():
        assert_same(expected, train(handle))


class Pair:
    """Two layers, each with an optimizer; the second one gets what the first one returns."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first, self.second = Linear(4, 4), Linear(4, 4)
        self.one, self.two = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (self.first, self.second))
        self.before = weights(self.first, self.second)

    def loss(self) -> Tensor:
        return loss_of(self.first, self.second)

    def assert_moved(self, *gradients: float) -> None:
        """Assert that each layer moved by so many times its gradient."""
        models = [Linear(4, 4), Linear(4, 4)]
        with torch.no_grad():
            for param, value in zip((p for model in models for p in model.parameters()), self.before, strict=True):
                param.copy_(value)
        loss_of(*models).backward()
        now = weights(self.first, self.second)
        for number, (model, times) in enumerate(zip(models, gradients, strict=True)):
            for param, value in zip(model.parameters(), now[2 * number :], strict=False):
                torch.testing.assert_close(value, param - 0.1 * times * param.grad, rtol=1e-5, atol=1e-6)


@pytest.fixture
def pair(handle: autoamp.Handle) -> Iterator[Pair]:
    with handle.disable_casts():
        yield Pair()


def test_a_closure_that_clears_what_another_block_left_is_right(handle: autoamp.Handle, pair: Pair) -> None:
    with handle.scale_loss(pair.loss(), pair.one) as scaled:
        scaled.backward()

    def closure() -> Tensor:
        pair.two.zero_grad()
        loss = pair.loss()
        with handle.scale_loss(loss, pair.two) as scaled:
            scaled.backward()
        return loss

    pair.two.step(closure)
    pair.assert_moved(0.0, 1.0)


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_of_nested_blocks_are_true(handle: autoamp.Handle, pair: Pair, passes: int) -> None:
    with handle.scale_loss(pair.loss(), pair.one) as first, handle.scale_loss(pair.loss(), pair.two) as second:
        if passes == 1:
            (first + second).backward()
        else:
            first.backward()
            second.backward()
    pair.one.step()
    pair.two.step()
    pair.assert_moved(2.0, 2.0)


def test_a_loss_of_an_earlier_block_may_run_backward_in_a_later_one(handle: autoamp.Handle, pair: Pair) -> None:
    with pytest.warns(UserWarning, match="no parameter"), handle.scale_loss(pair.loss(), pair.one) as first:
        pass
    with handle.scale_loss(pair.loss(), [pair.one, pair.two]) as second:
        (first + second).backward()
    pair.one.step()
    pair.two.step()
    pair.assert_moved(2.0, 2.0)


@pytest.mark.parametrize("mended", ["zeroed", "divided"])
def test_gradients_that_the_program_mends_within_the_block_are_its_own(
    handle: autoamp.Handle, pair: Pair, mended: str
) -> None:
    with handle.scale_loss(pair.loss(), pair.one) as scaled:
        scaled.backward()
        for param in pair.second.parameters():
            param.grad.zero_() if mended == "zeroed" else param.grad.div_(65536.0)  # type: ignore[union-attr]
    with warnings.catch_warnings():
        # Nobody scales the loss of that optimizer.
        warnings.simplefilter("ignore")
        pair.two.step()
    pair.assert_moved(0.0, 0.0 if mended == "zeroed" else 1.0)


@pytest.mark.parametrize("clears", ["never", "in the block", "before the block"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_later_pass_is_not_added_to_scaled_gradients(level: str, clears: str) -> None:
    models = [Linear(4, 4), Linear(4, 4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    (first, second), (one, two) = autoamp.initialize(
        models, optimizers, opt_level=level, dtype=torch.float16, device_type="cpu", verbosity=0
    )
    before = weights(first, second)
    with autoamp.scale_loss(loss_of(first, second), one) as scaled:
        scaled.backward()
    if clears == "before the block":
        second.zero_grad(set_to_none=False)
    with contextlib.ExitStack() as stack:
        if clears == "never":
            stack.enter_context(pytest.raises(UsageError, match="would add to gradients that are multiplied"))
        with autoamp.scale_loss(loss_of(second), two) as scaled:
            if clears == "in the block":
                two.zero_grad()
            scaled.backward()
    if clears == "never":
        # Also where the program catches it.
        with pytest.raises(UsageError, match="would use gradients"):
            two.step()
        assert_same(before, weights(first, second))
        return
    gradient = second.weight.grad.float()
    two.zero_grad()
    with autoamp.scale_loss(loss_of(second), two) as scaled:
        scaled.backward()
    assert torch.equal(gradient, second.weight.grad.float())


def test_gradients_that_no_pass_of_a_later_block_reaches_are_scaled_still(handle: autoamp.Handle, pair: Pair) -> None:
    with handle.scale_loss(pair.loss(), pair.one) as scaled:
        scaled.backward()
    with handle.scale_loss(pair.first(torch.ones(1, 4)).sum(), [pair.one, pair.two]) as scaled:
        scaled.backward()
    with pytest.raises(UsageError, match="would use gradients"):
        pair.two.step()
    pair.assert_moved(0.0, 0.0)


def checkpointed(*models: Linear) -> Tensor:
    torch.manual_seed(0)
    value: Any = torch.randn(8, 4, requires_grad=True)
    for model in models:
        value = checkpoint.checkpoint(model, value, use_reentrant=True)
    return value.float().square().mean()


def test_a_forgotten_optimizer_is_refused_within_a_reentrant_checkpoint(handle: autoamp.Handle, pair: Pair) -> None:
    with handle.scale_loss(checkpointed(pair.first, pair.second), pair.one) as scaled:
        scaled.backward()
    pair.one.step()
    with pytest.raises(UsageError, match="would use gradients"):
        pair.two.step()
    pair.assert_moved(1.0, 0.0)


def test_a_pass_after_its_block_is_refused_within_a_reentrant_checkpoint(handle: autoamp.Handle, pair: Pair) -> None:
    loss = checkpointed(pair.first)
    with pytest.warns(UserWarning, match="no parameter"), handle.scale_loss(loss, pair.one) as scaled:
        pass
    scaled.backward()
    with pytest.raises(UsageError, match="after its scale_loss block of SGD had ended"):
        pair.one.step()
    pair.assert_moved(0.0, 0.0)


CLIPS: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_ would clip": lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0),
    "clip_grad_value_ would clip": lambda params: torch.nn.utils.clip_grad_value_(params, 1.0),
    "get_total_norm would use": lambda params: torch.nn.utils.get_total_norm([param.grad for param in params]),
    "clip_grads_with_norm_ would clip": lambda params: torch.nn.utils.clip_grads_with_norm_(
        parameters=params, max_norm=1.0, total_norm=torch.ones(())
    ),
}


@pytest.mark.parametrize("function", CLIPS)
@pytest.mark.parametrize("read", ["params", "generator", "masters"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scaled_gradients_are_neither_clipped_by_torch_nor_stepped_after_a_look(
    level: str, read: str, function: str
) -> None:
    models = [Linear(4, 4), Linear(4, 4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    (first, second), (one, two) = autoamp.initialize(
        models, optimizers, opt_level=level, dtype=torch.float16, device_type="cpu", verbosity=0
    )
    clip = CLIPS[function]
    with autoamp.scale_loss(loss_of(first, second), one) as scaled:
        scaled.backward()
    params: Any = list(second.parameters())
    if read != "params":
        params = autoamp.master_params(two) if read == "generator" else list(autoamp.master_params(two))
    with pytest.raises(UsageError, match=f"{function} gradients that are multiplied .*those of 2"):
        clip(params)
    with pytest.raises(UsageError, match=r"SGD would use gradients that are multiplied by .*those of 2"):
        two.step()
    clip(autoamp.master_params(one))


def test_gradients_of_what_no_optimizer_steps_are_refused_with_the_remedy(handle: autoamp.Handle) -> None:
    body, head = Linear(4, 4), Linear(4, 4)
    model, optimizer = torch.nn.Sequential(body, head), torch.optim.SGD(head.parameters(), lr=0.1)
    with handle.scale_loss(loss_of(body, head), optimizer) as scaled:
        scaled.backward()
    with pytest.raises(UsageError, match=r"no optimizer steps them.*requires_grad_\(False\)") as caught:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert "Pass all optimizers" not in str(caught.value)
    torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    optimizer.step()
    body.requires_grad_(False).zero_grad()
    with handle.scale_loss(loss_of(body, head), optimizer) as scaled:
        scaled.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("count", [2, 3])
def test_threads_with_a_model_each_share_a_handle(level: str, count: int) -> None:
    models: Any = [torch.nn.Sequential(Linear(4, 64), torch.nn.Tanh(), Linear(64, 4)) for _ in range(count)]
    optimizers: Any = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models, optimizers = autoamp.initialize(
        models, optimizers, opt_level=level, dtype=torch.float16, device_type="cpu", loss_scale=128.0, verbosity=0
    )
    steps = 40

    def train(number: int) -> None:
        model, optimizer = models[number], optimizers[number]
        for _ in range(steps):
            optimizer.zero_grad()
            with autoamp.scale_loss(model(torch.ones(16, 4)).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            torch.nn.utils.clip_grad_norm_(autoamp.master_params(optimizer), 1.0)
            optimizer.step()

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(train, number) for number in range(count)]:
            done.result(120)
    handle = autoamp.current_handle()
    assert handle is not None
    assert (handle.stats["steps"], handle.skipped_steps) == (count * steps, 0)
    assert handle.state_dict()["loss_scaler0"]["unskipped"] == count * steps
    # A forgotten optimizer is told of all the same.
    with autoamp.scale_loss(models[0](models[1](torch.ones(16, 4))).float().square().mean(), optimizers[0]) as scaled:
        scaled.backward()
    with pytest.raises(UsageError, match="Pass all optimizers of the loss"):
        optimizers[1].step()


@pytest.mark.parametrize("use", ["step", "backward", "clip", "read", "none"])
@pytest.mark.parametrize("made", ["before init", "after init"])
def test_a_forgotten_optimizer_that_scales_its_loss_itself_is_refused(made: str, use: str) -> None:
    first, second = Linear(4, 4), Linear(4, 4).half()
    one = torch.optim.SGD(first.parameters(), lr=0.1)
    two = FP16_Optimizer(torch.optim.SGD(second.parameters(), lr=0.1)) if made == "before init" else None
    with initialized() as handle:
        two = two or FP16_Optimizer(torch.optim.SGD(second.parameters(), lr=0.1))
        before = weights(second)

        def loss() -> Tensor:
            return second(first(torch.ones(1, 4)).half()).float().square().mean()

        with handle.scale_loss(loss(), one) as scaled:
            scaled.backward()
        if use == "none":
            two.zero_grad()
            two.backward(loss())
            two.step()
            assert not torch.equal(before[0], second.weight)
            return
        uses: dict[str, Callable[[], Any]] = {
            "step": two.step, "backward": lambda: two.backward(loss()), "clip": lambda: two.clip_master_grads(1.0),
            "read": two.inspect_master_grad_data,
        }  # fmt: skip
        with pytest.raises(UsageError, match="SGD would use gradients that are multiplied"):
            uses[use]()
        with pytest.raises(UsageError, match="SGD would use gradients that are multiplied"):
            two.step()
        assert_same(before, weights(second))


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("both", [True, False])
def test_what_an_optimizer_that_scales_its_loss_itself_leaves_is_refused(
    handle: autoamp.Handle, both: bool, clears: bool
) -> None:
    first, second = Linear(4, 4).half(), Linear(4, 4).half()
    one, two = (torch.optim.SGD(model.parameters(), lr=2.0**-6) for model in (first, second))
    one = FP16_Optimizer(one, dynamic_loss_scale=True)
    if both:
        two = FP16_Optimizer(two, dynamic_loss_scale=True)

    def loss() -> Tensor:
        return second(first(torch.ones(1, 4, dtype=torch.half))).float().square().mean() / 64

    one.backward(loss())
    one.step()
    before = weights(second)
    if not clears:
        with pytest.raises(UsageError, match=r"SGD would use .* given SGD alone"):
            two.step()
    elif both:
        two.zero_grad()
        two.backward(loss())
        two.step()
    assert torch.equal(before[0], second.weight) is not (both and clears)


def test_a_group_that_is_added_after_the_block_may_accumulate(handle: autoamp.Handle, pair: Pair) -> None:
    with handle.scale_loss(pair.loss(), pair.one) as scaled:
        scaled.backward()
    pair.one.add_param_group({"params": list(pair.second.parameters())})
    with handle.scale_loss(pair.loss(), pair.one) as scaled:
        scaled.backward()
    pair.one.step()
    pair.assert_moved(2.0, 2.0)


def test_a_group_that_is_added_hides_no_gradients_that_a_block_left_scaled(handle: autoamp.Handle) -> None:
    first, second = Linear(4, 4), Linear(4, 4)
    one, two = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second))
    with handle.scale_loss(loss_of(first), one) as scaled:
        scaled.backward()
    one.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with handle.scale_loss(loss_of(first, second), two) as scaled:
        scaled.backward()
    with pytest.raises(UsageError, match="multiplied by the loss scale"):
        one.step()


def test_scaled_gradients_of_a_forgotten_optimizer_are_not_clipped(handle: autoamp.Handle) -> None:
    first, second = Linear(4, 4), Linear(4, 4)
    one, two = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second))
    with handle.scale_loss(loss_of(first, second), one) as scaled:
        scaled.backward()
    with pytest.raises(UsageError, match="multiplied by the loss scale"):
        handle.clip_grad_norm_(two, 1.0)


def test_a_closure_of_a_forgotten_optimizer_is_refused(handle: autoamp.Handle, pair: Pair) -> None:
    def closure() -> Tensor:
        loss = pair.loss()
        with handle.scale_loss(loss, pair.one) as scaled:
            scaled.backward()
        return loss

    with pytest.raises(UsageError, match="would use gradients"):
        pair.two.step(closure)
    pair.assert_moved(0.0, 0.0)


def swapped(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    optimizer.param_groups[0]["params"][0] = param


def grouped_anew(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": [param]})


@pytest.mark.parametrize("use", ["step", "clip"])
@pytest.mark.parametrize("change", [swapped, grouped_anew])
def test_a_parameter_in_the_place_of_another_is_refused_while_its_gradient_is_scaled(
    handle: autoamp.Handle, change: Callable[[torch.optim.Optimizer, Tensor], None], use: str
) -> None:
    first, second = Linear(4, 4), Linear(4, 4)
    optimizer = torch.optim.SGD([first.weight], lr=0.1)
    with handle.scale_loss(loss_of(first, second), optimizer) as scaled:
        scaled.backward()
    before = weights(second)
    change(optimizer, second.weight)
    uses = {"step": optimizer.step, "clip": lambda: handle.clip_grad_norm_(optimizer, 1.0)}
    with pytest.raises(UsageError, match="gradients that are multiplied"):
        uses[use]()
    assert_same(before, weights(second))


def test_a_group_that_is_taken_out_and_put_back_is_unscaled_once(handle: autoamp.Handle) -> None:
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1)
    with handle.scale_loss((first + second).sum(), optimizer) as scaled:
        scaled.backward()
    group = optimizer.param_groups.pop()
    optimizer.step()
    optimizer.param_groups.append(group)
    optimizer.step()
    assert second.grad is not None
    assert torch.equal(second.grad, torch.ones(2))


def alone(monkeypatch: pytest.MonkeyPatch, *optimizers: torch.optim.Optimizer) -> None:
    """Let there be no optimizers and modules of other tests."""
    monkeypatch.setattr("autoamp.core.block.living_optimizers_and_modules", lambda: (list(optimizers), []))


def test_an_optimizer_that_had_no_parameters_at_first_is_refused(
    handle: autoamp.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, late = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer, other = torch.optim.SGD([own], lr=0.1), torch.optim.SGD([{"params": []}], lr=0.1)
    alone(monkeypatch, optimizer, other)
    for _ in range(2):
        with handle.scale_loss(own.sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    other.add_param_group({"params": [late]})
    with handle.scale_loss((own + late).sum(), optimizer) as scaled:
        scaled.backward()
    with pytest.raises(UsageError, match="would use gradients"):
        other.step()
    assert torch.equal(late, torch.ones(2))


def test_an_optimizer_that_another_thread_makes_during_a_pass_is_refused(
    handle: autoamp.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, late = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([own], lr=0.1)
    alone(monkeypatch, optimizer)

    def step() -> None:
        with handle.scale_loss(own.sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    step()
    add = weakref.WeakSet.add

    def add_slowly(kept: Any, item: Any) -> None:
        # As if the other thread had its turn here.
        if item is not optimizer and isinstance(item, torch.optim.Optimizer):
            step()
        add(kept, item)

    monkeypatch.setattr(weakref.WeakSet, "add", add_slowly)
    other = torch.optim.SGD([late], lr=0.1)
    with handle.scale_loss((own + late).sum(), optimizer) as scaled:
        scaled.backward()
    with pytest.raises(UsageError, match="would use gradients"):
        other.step()


@pytest.mark.parametrize("thawed", [False, True])
def test_a_frozen_model_is_none_of_the_loss_until_it_is_thawed(handle: autoamp.Handle, thawed: bool) -> None:
    teacher, student = Linear(4, 4).requires_grad_(False), Linear(4, 4)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for _ in range(2):
        with handle.scale_loss(loss_of(teacher, student), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        teacher.requires_grad_(thawed)
    later = torch.optim.SGD(teacher.parameters(), lr=0.1)
    refusal = pytest.raises(UsageError, match="would use gradients") if thawed else contextlib.nullcontext()
    with refusal:
        later.step()
