"""Training programs drawn at random, and the two worlds that run them: autoamp, and plain torch in fp32.

The loss is linear in every parameter, with small whole numbers for inputs and targets. So each gradient is a small
whole number, which half precision holds exactly at any loss scale in use here, and plain torch in fp32 says what every
gradient and every weight must be. The plain world leaves a step out where an overflow was planted, and keeps the scale
by the rule of `torch.amp.GradScaler`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import autoamp
from autoamp import optimizers
from autoamp.fp16_utils import FP16_Optimizer, network_to_half

LAYERS = ("first", "second", "norm", "late")
# The one op whose casts these programs depend on: to patch all of torch for each of them takes time, and `test_casts`
# does that.
LISTS = {"extends": [], "fp16": ["linear"]}


class Net(nn.Module):
    """Layers side by side, so that no gradient depends on a weight. ``late`` is in no optimizer at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(2, 2, bias=False)
        # Stays in fp32 at O2. With these numbers it multiplies by its weight, exactly.
        self.norm = nn.BatchNorm1d(2, eps=0.0).eval()
        self.late = nn.Linear(2, 2).requires_grad_(False)
        numbers = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                # What bf16 has too: masters of FP16_Optimizer start from the half weights.
                parameter.copy_(torch.randint(8, 24, parameter.shape, generator=numbers) / 16)

    def forward(self, inputs: Tensor) -> list[Tensor]:
        return [getattr(self, name)(inputs) for name in LAYERS]


class OtherAdamW(torch.optim.AdamW):
    """Steps as AdamW does; it is no class that autoamp knows."""


class GroupAdam(torch.optim.Optimizer):
    """Adam with one count of steps for each group, as Apex has it."""

    def __init__(self, params: Any, lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p, grad in with_grads(group["params"]):
                state = self.state[p] or {"first": torch.zeros_like(p), "second": torch.zeros_like(p)}
                self.state[p] = state
                state["first"].lerp_(grad, 0.1)
                state["second"].mul_(0.999).addcmul_(grad, grad, value=0.001)
                first, second = 1 - 0.9 ** group["step"], 1 - 0.999 ** group["step"]
                p.addcdiv_(state["first"] / first, (state["second"] / second).sqrt() + group["eps"], value=-group["lr"])


def _sgd(**kwargs: Any) -> Callable[[Any], Any]:
    return lambda params: torch.optim.SGD(params, **({"lr": 0.125, "momentum": 0.5} | kwargs))


def _adam(kind: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda params: kind(params, lr=0.05, eps=1e-3, **kwargs)


# Each by the optimizer under test, and the plain one that computes the same.
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "SGD": (_sgd(), _sgd()),
    "SGD foreach": (_sgd(foreach=True, weight_decay=0.25), _sgd(weight_decay=0.25)),
    # Without momentum: torch's own fused SGD wants it of all parameters once one has it.
    "SGD fused": (_sgd(fused=True, momentum=0.0, weight_decay=0.25), _sgd(momentum=0.0, weight_decay=0.25)),
    "Adam": (_adam(torch.optim.Adam), _adam(torch.optim.Adam)),
    "Adam foreach": (_adam(torch.optim.Adam, foreach=True, amsgrad=True), _adam(torch.optim.Adam, amsgrad=True)),
    "AdamW": (_adam(torch.optim.AdamW), _adam(torch.optim.AdamW)),
    "AdamW fused": (_adam(torch.optim.AdamW, fused=True), _adam(torch.optim.AdamW)),
    "RMSprop": (_adam(torch.optim.RMSprop), _adam(torch.optim.RMSprop)),
    "other AdamW": (_adam(OtherAdamW), _adam(torch.optim.AdamW)),
    "FusedSGD": (lambda p: optimizers.FusedSGD(p, lr=0.125, momentum=0.5), _sgd()),
    "FusedAdam": (_adam(optimizers.FusedAdam), _adam(GroupAdam)),
}


@dataclass(frozen=True)
class Setup:
    """How a program is set up.

    Attributes:
        mode: An opt level, ``"init"`` for `autoamp.init` and `Handle.scale_loss`, ``"auto_scale"``, or
            ``"FP16_Optimizer"``.
        dtype: The half dtype.
        optimizer: A key of `OPTIMIZERS`.
        scale: The loss scale, or ``"dynamic"``: 32 at first, and twice that after each two steps without an overflow.
        hooked: Whether one weight has a hook that doubles its gradient, and another one that looks at it.
    """

    mode: str
    dtype: torch.dtype
    optimizer: str
    scale: float | str
    hooked: bool

    @property
    def has_masters(self) -> bool:
        return self.mode in ("O2", "FP16_Optimizer")

    @property
    def is_rough(self) -> bool:
        """Whether gradients may be in half precision after the block, so that writes to them round."""
        return self.mode == "O3" or (self.has_masters and self.scale == 1.0)


# -- what a program does --


@dataclass(frozen=True)
class Backward:
    """A block.

    Attributes:
        seed: What inputs and targets are made from.
        passes: How many backward passes there are in the block.
        overflow: The layer whose gradients become inf or nan, None as a rule.
        delay: Whether unscaling is delayed.
        look: Whether gradients are read within the block, where they are scaled.
        clear: How gradients are cleared within the block, before the backward pass; a key of `CLEARS`.
        fails: Whether an error that the program catches ends the block.
    """

    seed: int
    passes: int = 1
    overflow: str | None = None
    delay: bool = False
    look: bool = False
    clear: str | None = None
    fails: bool = False


class ProgramError(Exception):
    """What ends a block, and is caught by the program."""


@dataclass(frozen=True)
class Read:
    """Compare gradients of the model, or of what the optimizer steps."""

    masters: bool = False


@dataclass(frozen=True)
class Write:
    """Write to gradients or replace them; ``how`` is a key of `WRITES`."""

    how: str


@dataclass(frozen=True)
class Clear:
    """Clear gradients; ``how`` is a key of `CLEARS`."""

    how: str


@dataclass(frozen=True)
class Step:
    """Step the optimizer."""


@dataclass(frozen=True)
class Freeze:
    """Freeze a layer, or let it train again."""

    layer: str


@dataclass(frozen=True)
class AddGroup:
    """Give the optimizer the layer ``late`` as a group of its own."""


@dataclass(frozen=True)
class Fill:
    """Write a number into the weight of a layer."""

    layer: str
    value: float


@dataclass(frozen=True)
class Save:
    """Keep what is saved in a checkpoint."""


@dataclass(frozen=True)
class Load:
    """Load what was saved last, and clear the gradients."""


# -- the worlds --


class Plain:
    """Plain torch in fp32, or in half precision for O3."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model: Any = Net()
        if setup.mode == "O3":
            self.model.to(setup.dtype)
        self.optimizer = OPTIMIZERS[setup.optimizer][1](self.first_params())
        self.input_dtype = self.model.first.weight.dtype
        self._hook()

    def _hook(self) -> None:
        self.seen: list[Tensor] = []
        if self.setup.hooked:
            self.model.second.weight.register_hook(lambda gradient: gradient * 2)
            self.model.first.weight.register_post_accumulate_grad_hook(lambda p: self.seen.append(p.grad.abs().max()))

    def first_params(self) -> list[Tensor]:
        return [p for name, p in self.model.named_parameters() if not name.startswith("late")]

    def loss(self, action: Backward) -> Tensor:
        numbers = torch.Generator().manual_seed(action.seed)
        inputs = torch.randint(-1, 3, (2, 2), generator=numbers)
        outputs = self.model(inputs.to(self.input_dtype))
        total = torch.zeros(())
        for name, output in zip(LAYERS, outputs, strict=True):
            targets = torch.randint(-1, 2, output.shape, generator=numbers)
            total = total + (output.float() * targets).sum() * (math.inf if name == action.overflow else 1.0)
        return total

    def backward(self, action: Backward, look: Callable[[float], None] | None) -> None:
        loss = self.loss(action)
        self.clear(action.clear)
        for place in range(action.passes):
            loss.backward(retain_graph=place + 1 < action.passes)
        if look is not None:
            look(1.0)

    def clear(self, how: str | None) -> None:
        if how is not None:
            CLEARS[how](self)

    def step(self, skips: bool) -> None:
        if not skips:
            self.optimizer.step()

    def masters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def stepped(self) -> list[Tensor]:
        """Return the parameters of the model that the optimizer steps, in its order."""
        late = list(self.model.late.parameters()) if len(self.optimizer.param_groups) > 1 else []
        return [*self.first_params(), *late]

    def clip(self, limit: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.masters(), limit)

    def zero_grad(self, **kwargs: Any) -> None:
        # What FusedSGD does unless it is told otherwise.
        self.optimizer.zero_grad(**({"set_to_none": self.setup.optimizer != "FusedSGD"} | kwargs))

    def save(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, state: Any) -> None:
        model, optimizer = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def end(self) -> None:
        pass


class Mixed(Plain):
    """The same under autoamp."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.handle, self.auto = setup, None, None
        self.model = Net()
        dynamic = setup.scale == "dynamic"
        scaler: Any = autoamp.DynamicLossScaler(32.0, growth_interval=2) if dynamic else setup.scale
        make = OPTIMIZERS[setup.optimizer][0]
        if setup.mode == "FP16_Optimizer":
            network_to_half(self.model)
            if setup.dtype is torch.bfloat16:
                self.model.to(setup.dtype)
            arguments = {"init_scale": 32.0, "scale_window": 2}
            self.optimizer: Any = FP16_Optimizer(
                make(self.first_params()), static_loss_scale=1.0 if dynamic else scaler, dynamic_loss_scale=dynamic,
                dynamic_loss_args=arguments if dynamic else None,
            )  # fmt: skip
        else:
            self.optimizer = make(self.first_params())
            if setup.mode in ("init", "auto_scale"):
                self.handle = autoamp.init(dtype=setup.dtype, device_type="cpu", lists=LISTS, loss_scale=scaler)
                self.auto = self.handle.auto_scale() if setup.mode == "auto_scale" else None
            else:
                autoamp.initialize(
                    self.model, self.optimizer, opt_level=setup.mode, dtype=setup.dtype, device_type="cpu",
                    lists=LISTS, loss_scale=scaler, verbosity=0,
                )  # fmt: skip
                self.handle = autoamp.current_handle()
        # Models are given fp32, but for those that the program casts by hand.
        self.input_dtype = setup.dtype if setup.mode == "FP16_Optimizer" else torch.float32
        self._hook()

    def step(self, skips: bool) -> None:
        self.optimizer.step()

    def backward(self, action: Backward, look: Callable[[float], None] | None) -> None:
        loss = self.loss(action)
        if self.setup.mode == "FP16_Optimizer":
            self.clear(action.clear)
            for place in range(action.passes):
                again = place + 1 < action.passes
                self.optimizer.backward(loss, update_master_grads=not action.delay, retain_graph=again)
        elif self.auto is not None:
            super().backward(action, look)
        else:
            with (
                contextlib.suppress(ProgramError),
                autoamp.scale_loss(loss, self.optimizer, delay_unscale=action.delay) as scaled,
            ):
                self.clear(action.clear)
                for place in range(action.passes):
                    scaled.backward(retain_graph=place + 1 < action.passes)
                if look is not None:
                    look(self.scale)
                if action.fails:
                    raise ProgramError

    @property
    def scale(self) -> float:
        return float(self.optimizer.loss_scale if self.handle is None else self.handle.loss_scale)

    def masters(self) -> list[Tensor]:
        return list(autoamp.master_params(self.optimizer))

    def clip(self, limit: float) -> None:
        if self.handle is None:
            self.optimizer.clip_master_grads(limit)
        else:
            self.handle.clip_grad_norm_(self.optimizer, limit)

    def zero_grad(self, **kwargs: Any) -> None:
        if self.setup.optimizer == "FusedSGD" and self.handle is None:
            kwargs = {"set_to_none": False} | kwargs
        self.optimizer.zero_grad(**kwargs)

    def save(self) -> Any:
        amp = {} if self.handle is None else self.handle.state_dict()
        return *super().save(), amp

    def load(self, state: Any) -> None:
        super().load(state[:2])
        if self.handle is not None:
            self.handle.load_state_dict(state[2])

    def end(self) -> None:
        if self.auto is not None:
            self.auto.stop()
        if self.handle is not None:
            self.handle.deactivate()


def with_grads(params: list[Tensor]) -> Iterator[tuple[Tensor, Any]]:
    return ((p, p.grad) for p in params if p.grad is not None)


# -- writing and clearing --


def replace(params: list[Tensor], half: bool = False) -> None:
    for p, grad in with_grads(params):
        p.grad = (grad * 2).to(p.dtype) if half else grad * 2


def in_place(params: list[Tensor], write: Callable[[Any], object]) -> None:
    for _, grad in with_grads(params):
        write(grad)


def set_data(grad: Tensor) -> None:
    grad.data = grad.data * 2


WRITES: dict[str, Callable[[Any], object]] = {
    "clip model": lambda w: torch.nn.utils.clip_grad_norm_(w.model.parameters(), 2.0),
    "clip by autoamp": lambda w: w.clip(2.0),
    "replace": lambda w: replace(w.stepped()),
    "replace by the parameter's dtype": lambda w: replace(w.stepped(), half=True),
    "replace and clip": lambda w: (replace(w.stepped()), w.clip(2.0)),
    "replace the first": lambda w: replace([w.model.first.weight]),
    "replace masters": lambda w: replace(w.masters()),
    "mul_": lambda w: in_place(w.stepped(), lambda g: g.mul_(2)),
    "data": lambda w: in_place(w.stepped(), lambda g: g.data.mul_(2)),
    "set data": lambda w: in_place(w.stepped(), set_data),
}
REPLACES = {name: "masters" if "masters" in name else "model" for name in WRITES if name.startswith("replace")}


def to_none(params: list[Tensor]) -> None:
    for p in params:
        p.grad = None


CLEARS: dict[str, Callable[[Any], object]] = {
    "optimizer": lambda w: w.zero_grad(),
    "optimizer, zeros": lambda w: w.zero_grad(set_to_none=False),
    "optimizer, None": lambda w: w.zero_grad(set_to_none=True),
    "model": lambda w: w.model.zero_grad(),
    "model, zeros": lambda w: w.model.zero_grad(set_to_none=False),
    "parameters": lambda w: to_none(w.stepped()),
    "parameters, zero_": lambda w: in_place(w.stepped(), lambda g: g.zero_()),
    "masters": lambda w: to_none(w.masters()),
    "masters, zero_": lambda w: in_place(w.masters(), lambda g: g.zero_()),
    "one parameter": lambda w: to_none([w.model.first.weight]),
}
ZEROS_ONE_SIDE = {"parameters, zero_": "model", "model, zeros": "model", "masters, zero_": "masters"}
CLEARS_ALL = {"optimizer", "optimizer, None", "optimizer, zeros", "model", "parameters"}
CLEARS_ONE_SIDE = {"model": "model", "parameters": "model", "one parameter": "model", "masters": "masters"}


class Course:
    """One world's way through a program. The plain world notes what it finds, and the other one is held to that.

    Nothing of the one is alive while the other runs: `Handle.auto_scale` serves all optimizers of the process.
    """

    def __init__(self, setup: Setup, notes: Iterator[Any] | None = None) -> None:
        self.setup = setup
        self.world = Plain(setup) if notes is None else Mixed(setup)
        self.notes, self.written = notes, list[Any]()
        self.scale, self.unskipped = (32.0, 0) if setup.scale == "dynamic" else (float(setup.scale), 0)
        self.knows_scale = True
        # Ways to clear after which neither side has a gradient; others leave None where it was.
        self.clears_both = {"optimizer, None", "optimizer"} - (
            {"optimizer"} if setup.optimizer == "FusedSGD" else set()
        )
        # Ways to clear after which no gradient is there. Zeros in place of an overflow skip the next step.
        self.clears_all = CLEARS_ALL - {"optimizer, zeros"} - ({"optimizer"} - self.clears_both)
        # Whether the next step is to be skipped, whether a block waits for its step, whether gradients are scaled.
        self.overflowed = self.pending = self.delayed = False
        # Whether gradients that overflowed were cleared: a program goes on to its next block then.
        self.dropped = False
        # On which side gradients were replaced or cleared: the other one hears of it by the next block or step.
        self.side: str | None = None
        # Whether a weight was written to since the last step, by which masters have followed.
        self.filled = False
        # Whether a gradient was rounded to half precision, by which both worlds may differ from then on.
        self.rounded = False
        self.saved: Any = None

    def noted(self, found: Callable[[], Any]) -> Any:
        """Return what the plain world finds, and note it."""
        if self.notes is not None:
            return next(self.notes)
        self.written.append(found())
        return self.written[-1]

    def do(self, action: Any) -> None:
        getattr(self, type(action).__name__.lower())(action)

    # -- actions --

    def backward(self, action: Backward) -> None:
        if self.is_dropped():
            # The scaler learns from those gradients all the same.
            self.update(False)
        if self.dropped:
            self.knows_scale &= self.setup.mode != "auto_scale"
            self.update(True)
            self.overflowed = self.dropped = False
        overflow = action.overflow if self.setup.scale != 1.0 else None
        if overflow is not None and not any(p.requires_grad for p in getattr(self.world.model, overflow).parameters()):
            overflow = None
        clear = action.clear if not self.overflowed and self.side is None else None
        # Whether the scaler hears of an earlier block whose gradients go within this one is left open.
        self.knows_scale &= clear is None or not self.pending
        self.overflowed |= overflow is not None
        self.pending, self.side = True, None
        self.delayed = action.delay and self.setup.mode != "auto_scale"
        action = dataclasses.replace(action, overflow=overflow, delay=self.delayed, clear=clear)
        looks = action.look and not self.overflowed and self.setup.mode not in ("FP16_Optimizer", "auto_scale")
        self.world.backward(action, self.compare_grads if looks else None)

    def is_dropped(self) -> bool:
        """Whether the gradients of a block were cleared, so that no step is taken by them."""
        if not self.pending or self.overflowed:
            return False
        dropped = self.noted(lambda: all(p.grad is None for p in self.world.stepped()))
        # `auto_scale` hears of some ways to clear at once and of others later: its scale is compared no more.
        self.knows_scale &= not dropped or self.setup.mode != "auto_scale"
        return bool(dropped)

    def read(self, action: Read) -> None:
        side = "masters" if action.masters else "model"
        for p in self.world.masters() if action.masters else self.world.stepped():
            expected = self.noted(lambda p=p: None if p.grad is None else p.grad.clone())
            if self.side in (None, side):
                assert (p.grad is None) is (expected is None), "a gradient is None in one world alone"
                if p.grad is not None and not self.overflowed and not self.delayed:
                    self.close(p.grad, expected, "a gradient")

    def compare_grads(self, factor: float = 1.0) -> None:
        for p in self.world.stepped():
            expected = self.noted(lambda p=p: None if p.grad is None else p.grad.clone())
            assert (p.grad is None) is (expected is None), "a gradient is None in one world alone"
            if p.grad is not None:
                self.close(p.grad, expected * factor, f"a gradient at scale {factor}")

    def write(self, action: Write) -> None:
        side = REPLACES.get(action.how)
        has_grads = self.noted(lambda: bool(list(with_grads(self.world.stepped()))))
        if has_grads and not self.delayed and not self.overflowed and self.side in (None, side):
            WRITES[action.how](self.world)
            self.rounded |= "dtype" in action.how
            self.side = side if self.setup.has_masters else None

    def clear(self, action: Clear) -> None:
        side = CLEARS_ONE_SIDE.get(action.how)
        if self.overflowed and action.how not in CLEARS_ALL:
            return
        if self.side in (None, side or ZEROS_ONE_SIDE.get(action.how, self.side)):
            CLEARS[action.how](self.world)
            # Zeros take no place where no gradient is left.
            self.dropped |= self.overflowed and action.how in self.clears_all
            # Whether the scaler hears of scaled gradients that were cleared depends on who looks next.
            self.knows_scale &= not self.delayed
            self.delayed = self.delayed and action.how == "one parameter"
            if self.setup.has_masters and (side or action.how in self.clears_both):
                self.side = side

    def step(self, _: Step) -> None:
        if self.dropped:
            return
        skips, pending = self.overflowed, self.pending
        self.is_dropped()
        self.world.step(skips)
        if pending:
            self.update(skips)
        self.overflowed = self.pending = self.delayed = False
        self.side = None
        self.filled &= skips
        self.compare()
        if skips:
            self.clear(Clear("optimizer"))

    def freeze(self, action: Freeze) -> None:
        for p in getattr(self.world.model, action.layer).parameters():
            p.requires_grad_(not p.requires_grad)

    def addgroup(self, _: AddGroup) -> None:
        if len(self.world.optimizer.param_groups) == 1:
            self.world.model.late.requires_grad_(True)
            self.world.optimizer.add_param_group({"params": list(self.world.model.late.parameters())})

    def fill(self, action: Fill) -> None:
        with torch.no_grad():
            getattr(self.world.model, action.layer).weight.fill_(action.value)
        self.filled = True

    def save(self, _: Save) -> None:
        self.saved = len(self.world.optimizer.param_groups), self.scale, self.unskipped, self.world.save()

    def load(self, _: Load) -> None:
        if self.saved is not None and not self.pending and self.saved[0] == len(self.world.optimizer.param_groups):
            _, self.scale, self.unskipped, state = self.saved
            self.world.load(state)
            self.filled = False
            self.clear(Clear("optimizer"))
            self.compare()

    # -- the rule of the scale, and comparisons --

    def update(self, overflowed: bool) -> None:
        if self.setup.scale != "dynamic":
            return
        self.unskipped = 0 if overflowed else self.unskipped + 1
        if overflowed:
            self.scale /= 2
        elif self.unskipped == 2:
            self.scale, self.unskipped = self.scale * 2, 0

    def close(self, found: Any, expected: Any, what: str) -> None:
        rough = (
            self.rounded
            or self.setup.is_rough
            or any(t.dtype in (torch.float16, torch.bfloat16) for t in (found, expected))
        )
        torch.testing.assert_close(
            found.detach().double(), expected.detach().double(), msg=lambda text: f"{what}: {text}",
            **({"rtol": 2e-2, "atol": 1e-2} if rough else {"rtol": 1e-4, "atol": 1e-5}),
        )  # fmt: skip

    def compare(self) -> None:
        """Compare weights, masters and the scale."""
        for weight, master in zip(self.world.stepped(), self.world.masters(), strict=True):
            expected = self.noted(lambda master=master: master.detach().clone())
            if not self.filled:
                self.close(master, expected, "what the optimizer steps")
                assert torch.equal(weight, master.to(weight.dtype)), "a weight is not its rounded master"
        if self.notes is not None and self.knows_scale:
            assert self.world.scale == self.scale

    def run(self, actions: list[Any]) -> list[Any]:
        """Run a program, and return what was noted."""
        try:
            for action in actions:
                self.do(action)
            if not self.overflowed and not self.delayed and self.side is None:
                self.compare_grads()
        finally:
            self.world.end()
        return self.written


def run(setup: Setup, actions: list[Any]) -> None:
    """Run a program in both worlds. AssertionError: they differ."""
    notes = Course(setup).run(actions)
    Course(setup, iter(notes)).run(actions)
