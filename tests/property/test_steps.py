"""A step is right or refused: programs of two models and two optimizers, drawn at random, beside plain torch.

Every gradient is a small whole number, which half precision holds at any scale in use here, so that weights, states
and what the optimizers step are those of plain torch bit for bit. The plain program knows what must be skipped and
what must be refused; it runs first, and notes the weights after each action.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autoamp
from autoamp.errors import UsageError
from autoamp.fp16_utils import FP16_Optimizer
from autoamp.optimizers import FusedAdam, FusedSGD

LISTS = {"extends": [], "fp16": ["linear"]}


@dataclass(frozen=True)
class Way:
    """How a program gets mixed precision.

    Attributes:
        name: An opt level, ``"auto_scale"``, or ``"FP16_Optimizer"``: without a handle, over models cast by hand.
        dtype: The half dtype.
        scale: ``"dynamic"``, which is 32 at first and grows after two steps without an overflow, or a static loss
            scale. At 1.0 nothing is checked, and inf and nan cannot be compared: `without_overflows` is for it.
    """

    name: str
    dtype: torch.dtype = torch.float16
    scale: Any = "dynamic"

    @property
    def checks(self) -> bool:
        """Whether gradients are scaled and checked."""
        return bool(self.scale != 1.0)

    @property
    def has_masters(self) -> bool:
        """Whether optimizers step fp32 copies of half parameters."""
        return self.name in ("O2", "FP16_Optimizer")


class Net(nn.Module):
    """Two layers side by side, so that no gradient depends on a weight. ``late`` is in no optimizer at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        self.first.bias.register_hook(lambda grad: grad * 2)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.first.weight.dtype)
        return self.first(inputs) + self.late(inputs)  # type: ignore[no-any-return]


class ProgramError(Exception):
    """What ends a block, and is caught by the program."""


@dataclass(frozen=True)
class Block:
    """A backward pass of a loss of some models, scaled for some optimizers.

    ``how`` is what else happens: ``"twice"`` is two passes in one block, ``"delayed"`` leaves the gradients scaled,
    ``"cleared"`` clears them in the block, ``"failed"`` ends it with an error, and ``"late"`` is a pass after it.
    """

    seed: int
    models: tuple[int, ...]
    optimizers: tuple[int, ...]
    overflows: bool = False
    how: str = ""


@dataclass(frozen=True)
class Write:
    """Write to the gradients that one optimizer steps by."""

    optimizer: int
    how: str


@dataclass(frozen=True)
class Clear:
    """Clear the gradients of one optimizer."""

    optimizer: int
    how: str


@dataclass(frozen=True)
class Step:
    """Step one optimizer, with a closure or without; ``within`` is to step the one within it, where there is one."""

    optimizer: int
    closure: Block | None = None
    within: bool = False


@dataclass(frozen=True)
class Schedule:
    """Give one optimizer a scheduler."""

    optimizer: int


@dataclass(frozen=True)
class Fill:
    """Write to what an optimizer steps, outside of its step."""

    optimizer: int


@dataclass(frozen=True)
class Freeze:
    """Freeze the bias of one model, or let it train again."""

    optimizer: int


@dataclass(frozen=True)
class AddGroup:
    """Give one optimizer the layer ``late`` as a group of its own."""

    optimizer: int


@dataclass(frozen=True)
class Save:
    """Keep what a checkpoint has."""


@dataclass(frozen=True)
class Load:
    """Clear the gradients, and load what was kept last."""


def _replace(params: Sequence[Any]) -> None:
    for param in params:
        param.grad = param.grad.clamp(-1, 1)


def _in_place(write: Callable[[Any], Any]) -> Callable[[Sequence[Any]], None]:
    return lambda params: [write(param.grad) for param in params] and None


WRITES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "clip": lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0),
    "nan by clipping": lambda params: torch.nn.utils.clip_grad_norm_(params, math.nan),
    "replace": _replace,
    "replace at the model": _replace,
    "replace by nan": lambda params: setattr(params[0], "grad", params[0].grad / 0 * 0),
    "double": _in_place(lambda grad: grad.mul_(2)),
    "inf": lambda params: params[-1].grad.view(-1)[-1:].fill_(math.inf),
    "foreach": lambda params: torch._foreach_mul_([param.grad for param in params], 0.5),
}
CLEARS: dict[str, Callable[[Any, Any], Any]] = {
    "optimizer": lambda optimizer, model: optimizer.zero_grad(set_to_none=True),
    "optimizer, zeros": lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
    "model": lambda optimizer, model: model.zero_grad(),
    "model, zeros": lambda optimizer, model: model.zero_grad(set_to_none=False),
    "foreach": lambda optimizer, model: torch._foreach_zero_(
        [param.grad for param in model.parameters() if param.grad is not None] or [torch.ones(1)]
    ),
}


class Around(torch.optim.Optimizer):
    """Shares its groups and state with another optimizer, which it steps, as SAM and its like do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.125, momentum=0.5)
        self.defaults = self.base.defaults
        self._share()

    def _share(self) -> None:
        self.base.param_groups, self.base.state = self.param_groups, self.state

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.base.step()
        return loss


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
    "SGD, fused": lambda params: torch.optim.SGD(params, lr=0.125, weight_decay=0.25, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, eps=1e-3),
    "Adam, foreach": lambda params: torch.optim.Adam(params, lr=0.05, eps=1e-3, foreach=True, amsgrad=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.05, eps=1e-3, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.05, eps=1e-3),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.05, eps=1e-3),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.125, momentum=0.5),
    "SGD in a wrapper": Around,
}


class Refused(Exception):
    """The program is wrong, and says so; it ends here."""


class Unclear(Exception):
    """The program is wrong in a way that nobody can prove; what follows is not compared."""


class World:
    """Plain torch: the models, their optimizers, and what a runtime of mixed precision has to make of them."""

    def __init__(self, way: Way, makers: Sequence[str], early: Sequence[int]) -> None:
        self.way = way
        self.models: list[Any] = [Net() for _ in makers]
        numbers = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in (param for model in self.models for param in model.parameters()):
                param.copy_(torch.randint(8, 24, param.shape, generator=numbers) / 16)
        if way.name == "O3" and type(self) is World:
            self.models = [model.to(way.dtype) for model in self.models]
        self.optimizers = [
            OPTIMIZERS[name](model.first.parameters()) for name, model in zip(makers, self.models, strict=True)
        ]
        self.saved: list[Any] = []
        self.schedulers: dict[int, Any] = {}
        for number in early:
            self.schedule(Schedule(number))
        # For each optimizer: what blocks found since its last step; whether any block checked; gradients left scaled.
        self.found: list[list[bool]] = [[], []]
        self.was_checked, self.still_scaled = [False, False], [False, False]
        self.delayed, self.delayed_by = [False, False], [0, 0]
        # Gradients that the program replaced at masters, and then cleared at half parameters. As in Apex the masters
        # keep theirs, until a backward pass.
        self.replaced, self.keeps_replaced = [False, False], [False, False]

    def params(self, number: int) -> list[Any]:
        return [param for group in self.optimizers[number].param_groups for param in group["params"]]

    def are_dropped(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether the program dropped gradients, or set all to 0; automatic scaling puts 0 there itself."""
        return all(grad is None or (self.way.name != "auto_scale" and not grad.count_nonzero()) for grad in grads)

    def loss(self, action: Block) -> Tensor:
        total = torch.zeros(())
        for number in action.models:
            numbers = torch.Generator().manual_seed(2 * action.seed + number)
            inputs, targets = torch.randint(-1, 3, (2, 2, 2), generator=numbers).float()
            total = total + (self.models[number](inputs).float() * targets).sum()
        return total * math.inf if action.overflows else total

    def block(self, action: Block) -> None:
        every = tuple(range(len(self.models)))
        auto = self.way.name == "auto_scale"
        named = action.models if auto else action.optimizers
        if self.way.name == "FP16_Optimizer" and (action.how == "late" or action.models != named):
            # Without a handle it does not see what other passes leave in its gradients.
            raise Unclear
        if action.how == "late" and not auto and self.way.checks:
            raise Refused
        if any(self.still_scaled[number] for number in named if number in action.models):
            raise Refused
        if any(self.delayed[number] for number in action.models if number not in named):
            # They are right if the scale is the same still.
            raise Unclear
        for number in named:
            if self.has_two_scalers and self.delayed_by[number] != action.seed % 2:
                # It is checked before this block, by its own scaler.
                self.finish_delayed(number)
            self.delayed[number] = False
        if action.how == "cleared":
            if any(any(self.found[number]) for number in named):
                raise Unclear
            for number in named:
                self.clear(Clear(number, "optimizer"))
        for number in action.models:
            self.replaced[number] = self.keeps_replaced[number] = False
        before = [[None if p.grad is None else p.grad.clone() for p in self.params(number)] for number in every]
        for number in named:
            if self.found[number] and self.are_dropped(before[number]):
                self.found[number].clear()
        for _ in range(2 if action.how == "twice" else 1):
            self.loss(action).backward()
        overflowed = action.overflows and not set(named).isdisjoint(action.models)
        # A block looks at the gradients of its optimizers, but for those of which an earlier block has told already; a
        # pass looks at what it adds, and the step at the sum.
        untold = [number for number in named if not any(self.found[number])]
        stale = any(grad is not None and not grad.isfinite().all() for number in untold for grad in before[number])
        for number in named:
            if not self.way.checks:
                continue
            if action.how == "delayed" and not auto:
                self.delayed[number], self.delayed_by[number] = True, action.seed % 2
            elif any(param.grad is not None for param in self.params(number)):
                self.found[number].append(overflowed or (stale and not auto))
                self.was_checked[number] = True
        for number in action.models:
            if number not in named:
                # Zeros are the same at any scale.
                self.still_scaled[number] = self.way.checks and any(
                    p.grad is not None and p.grad.count_nonzero() for p in self.params(number)
                )
            elif action.overflows and auto:
                # Zeros come in place of a gradient that overflowed.
                for param, grad in zip(self.params(number), before[number], strict=True):
                    if param.requires_grad:
                        param.grad = torch.zeros_like(param) if grad is None else grad

    def write(self, action: Write) -> None:
        params = [param for param in self.params(action.optimizer) if param.grad is not None]
        if params:
            if self.still_scaled[action.optimizer]:
                raise Refused if "clip" in action.how else Unclear
            if self.keeps_replaced[action.optimizer] or self.delayed[action.optimizer]:
                raise Unclear
            self.replaced[action.optimizer] |= action.how in ("replace", "replace by nan") and self.way.has_masters
            WRITES[action.how](params)

    def clear(self, action: Clear) -> None:
        CLEARS[action.how](self.optimizers[action.optimizer], self.models[action.optimizer])
        self.still_scaled[action.optimizer] = False
        self.keeps_replaced[action.optimizer] = self.replaced[action.optimizer] and "optimizer" not in action.how

    def schedule(self, action: Schedule) -> None:
        self.schedulers[action.optimizer] = torch.optim.lr_scheduler.StepLR(self.optimizers[action.optimizer], 2)

    def fill(self, action: Fill) -> None:
        with torch.no_grad():
            for param in self.params(action.optimizer):
                param.mul_(0.5)

    def freeze(self, action: Freeze) -> None:
        bias = self.models[action.optimizer].first.bias
        bias.requires_grad_(not bias.requires_grad)

    def addgroup(self, action: AddGroup) -> None:
        optimizer, late = self.optimizers[action.optimizer], self.models[action.optimizer].late
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(late.requires_grad_(True).parameters())})

    def parts(self) -> list[Any]:
        return [*self.models, *self.optimizers]

    def save(self, action: Save) -> None:
        groups = [len(optimizer.param_groups) for optimizer in self.optimizers]
        self.saved = [groups, *copy.deepcopy([part.state_dict() for part in self.parts()])]

    def load(self, action: Load) -> None:
        if self.saved and self.saved[0] == [len(optimizer.param_groups) for optimizer in self.optimizers]:
            for number in range(len(self.models)):
                self.clear(Clear(number, "optimizer"))
            for part, state in zip(self.parts(), copy.deepcopy(self.saved[1:]), strict=True):
                part.load_state_dict(state)

    def step(self, action: Step) -> None:
        number = action.optimizer
        if self.still_scaled[number] and action.closure is None:
            raise Refused
        if self.keeps_replaced[number]:
            raise Unclear
        self.finish_delayed(number)
        if action.closure is not None and self.are_dropped([param.grad for param in self.params(number)]):
            # The gradients of earlier blocks were dropped.
            self.found[number].clear()
        skips = self.must_skip(number, bool(action.closure))
        evaluates = action.closure is not None and (not skips or self.way.name == "auto_scale")
        if evaluates:
            # A closure clears what another block has left.
            self.optimizers[number].zero_grad()
            self.still_scaled[number] = False
            self.found[number].clear()
            self.block(action.closure)
            if skips:
                # For its loss alone. The gradients are there for the next step.
                self.after_step(number)
                return
            skips = self.must_skip(number, False)
        self.found[number].clear()
        if not skips:
            self.stepper(action).step()
        self.after_step(number)

    @property
    def has_two_scalers(self) -> bool:
        """Whether losses of odd seeds have a scaler of their own."""
        return self.way.name.startswith("O")

    def finish_delayed(self, number: int) -> None:
        """Check what a block left scaled."""
        if self.delayed[number]:
            self.delayed[number] = False
            grads = [param.grad for param in self.params(number) if param.grad is not None]
            if grads:
                self.found[number].append(not all(grad.isfinite().all() for grad in grads))
                self.was_checked[number] = True

    def stepper(self, action: Step) -> Any:
        """Return what the program steps: the optimizer, or the one within it."""
        optimizer = self.optimizers[action.optimizer]
        return getattr(optimizer, "base", optimizer) if action.within else optimizer

    def must_skip(self, number: int, closure: bool) -> bool:
        finite = all(bool(p.grad.isfinite().all()) for p in self.params(number) if p.grad is not None)
        looks = self.found[number] or (self.was_checked[number] and not closure)
        return any(self.found[number]) or bool(looks and not finite)

    def after_step(self, number: int) -> None:
        if number in self.schedulers:
            self.schedulers[number].step()

    def grads(self, action: Any) -> list[Tensor | None]:
        """Return the gradients of what a block has unscaled, where none overflowed."""
        if not isinstance(action, Block) or any(map(any, [*self.found, self.delayed])):
            return []
        some = [number for number in action.models if number in action.optimizers or self.way.name == "auto_scale"]
        return [None if p.grad is None else p.grad.nan_to_num(1e9) for number in some for p in self.params(number)]

    def stepped_layers(self, number: int) -> list[Any]:
        return [self.models[number].first, self.models[number].late][: len(self.optimizers[number].param_groups)]

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for number in range(len(self.models)) for param in self.params(number)]

    def state(self) -> list[Any]:
        found: list[Any] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found.append((group["lr"], group.get("step")))
                for param in group["params"]:
                    found += [torch.as_tensor(value).clone() for _, value in sorted(optimizer.state[param].items())]
        return [*self.weights(), *found]

    def close(self) -> None:
        """Nothing is to be undone."""


class Mixed(World):
    """The same program under autoamp."""

    def __init__(self, way: Way, makers: Sequence[str], early: Sequence[int]) -> None:
        super().__init__(way, makers, early)
        self.handle: Any = None
        is_dynamic, scale = way.scale == "dynamic", way.scale
        if way.name == "FP16_Optimizer":
            self.models = [model.to(way.dtype) for model in self.models]
            arguments = {"init_scale": 32.0, "scale_window": 2}
            self.optimizers = [FP16_Optimizer(one, scale, is_dynamic, arguments) for one in self.optimizers]
            return
        if is_dynamic:
            scale = autoamp.DynamicLossScaler(32.0, growth_interval=2)
        given: dict[str, Any] = {"dtype": way.dtype, "device_type": "cpu", "lists": LISTS, "loss_scale": scale}
        if way.name.startswith("O"):
            self.models, self.optimizers = autoamp.initialize(
                self.models, self.optimizers, opt_level=way.name, num_losses=2, verbosity=0, **given
            )
        else:
            autoamp.init(**given)
        self.handle = autoamp.current_handle()
        if way.name == "auto_scale":
            self.handle.auto_scale()

    def backward(self, action: Block) -> None:
        """Let each `FP16_Optimizer` run the backward pass of its own model's loss."""
        for number in action.models:
            if action.how == "cleared":
                self.clear(Clear(number, "optimizer"))
            loss = self.loss(dataclasses.replace(action, models=(number,)))
            for last in (False, True) if action.how == "twice" else (True,):
                self.optimizers[number].backward(loss, action.how != "delayed", retain_graph=not last)

    def block(self, action: Block) -> None:
        if self.way.name == "FP16_Optimizer":
            self.backward(action)
            return
        named, loss = action.models if self.way.name == "auto_scale" else action.optimizers, self.loss(action)
        block: Any = contextlib.nullcontext(loss)
        if self.way.name != "auto_scale":
            optimizers = [self.optimizers[number] for number in named]
            loss_id = action.seed % 2 if self.has_two_scalers else 0
            block = self.handle.scale_loss(loss, optimizers, loss_id, delay_unscale=action.how == "delayed")
        with contextlib.suppress(ProgramError), block as scaled:
            if action.how == "cleared":
                for number in named:
                    self.clear(Clear(number, "optimizer"))
            if action.how != "late":
                scaled.backward(retain_graph=action.how == "twice")
            if action.how == "twice":
                scaled.backward()
            if action.how == "failed":
                raise ProgramError
        if action.how == "late":
            scaled.backward()

    def fill(self, action: Fill) -> None:
        super().fill(action)
        if self.handle is None:
            self.optimizers[action.optimizer].model_from_masters()

    def parts(self) -> list[Any]:
        return [*super().parts(), *([self.handle] if self.handle else [])]

    def write(self, action: Write) -> None:
        # This lets masters have the gradients that another optimizer's block has left in half parameters.
        at_model = (param for layer in self.stepped_layers(action.optimizer) for param in layer.parameters())
        every = at_model if "model" in action.how else autoamp.master_params(self.optimizers[action.optimizer])
        params = [param for param in every if param.grad is not None]
        if params:
            WRITES[action.how](params)

    def clear(self, action: Clear) -> None:
        CLEARS[action.how](self.optimizers[action.optimizer], self.models[action.optimizer])

    def step(self, action: Step) -> None:
        optimizer = self.optimizers[action.optimizer]

        def closure() -> Tensor:
            optimizer.zero_grad()
            assert action.closure is not None
            self.block(action.closure)
            return self.loss(action.closure).detach()

        self.stepper(action).step() if action.closure is None else optimizer.step(closure)
        self.after_step(action.optimizer)

    def close(self) -> None:
        if self.handle is not None:
            self.handle.deactivate()


def _actions(world: World, actions: Sequence[Any]) -> Iterator[Any]:
    """Do the actions, and yield what each leads to: the error that ends the program, or the state."""
    for action in actions:
        try:
            getattr(world, type(action).__name__.lower())(action)
        except (Refused, UsageError):
            yield "refused", world.weights(), []
            return
        except Unclear:
            yield "unclear", None, []
            return
        yield "done", world.state(), world.grads(action)


def run(way: Way, makers: Sequence[str], early: Sequence[int], actions: Sequence[Any]) -> None:
    """Run a program in both worlds. AssertionError: they differ."""
    plain = list(_actions(World(way, makers, early), actions))
    with contextlib.closing(Mixed(way, makers, early)) as world:
        for action, expected, found in zip(actions, plain, _actions(world, actions), strict=False):
            if expected[0] == "unclear":
                return
            assert found[0] == expected[0], action
            # Where gradients overflowed there is nothing to compare with.
            pairs = zip(found[1], expected[1], strict=True), zip(found[2], expected[2], strict=bool(expected[2]))
            for one, other in itertools.chain(*pairs):
                equal = torch.equal(one, other) if isinstance(one, Tensor) else one == other
                assert equal, (action, one, other)
            if way.has_masters:
                with torch.no_grad():
                    # A forward pass sees what the optimizer steps.
                    world.loss(Block(0, (0, 1), ()))
                layers = itertools.chain(*map(world.stepped_layers, (0, 1)))
                halves = [param for layer in layers for param in layer.parameters()]
                assert all(torch.equal(half, p.to(half.dtype)) for half, p in zip(halves, world.weights(), strict=True))


NUMBERS = st.integers(0, 1)
SUBSETS = st.sampled_from([(0,), (1,), (0, 1)])
HOWS = st.sampled_from([""] * 4 + ["twice", "delayed", "cleared", "failed"])
RIGHT = SUBSETS.flatmap(
    lambda some: st.builds(
        Block, st.integers(0, 20), st.just(some), st.just(some), st.sampled_from([False] * 4 + [True]), HOWS
    )
)
WRONG = st.builds(
    Block, st.integers(0, 20), SUBSETS, SUBSETS, st.sampled_from([False] * 6 + [True]),
    st.sampled_from([""] * 4 + ["late"]),
)  # fmt: skip


def _with_closure(number: int, seed: int, overflows: bool) -> Step:
    return Step(number, Block(seed, (number,), (number,), overflows))


def without_overflows(actions: Sequence[Any]) -> list[Any]:
    """Return a program in which nothing is inf or nan."""
    calm = [dataclasses.replace(one, overflows=False) if isinstance(one, Block) else one for one in actions]
    calm = [
        dataclasses.replace(one, closure=dataclasses.replace(one.closure, overflows=False))
        if isinstance(one, Step) and one.closure is not None
        else one
        for one in calm
    ]
    return [one for one in calm if not (isinstance(one, Write) and ("nan" in one.how or one.how == "inf"))]


STEPS = st.one_of(
    st.builds(Step, NUMBERS),
    st.builds(Step, NUMBERS, within=st.booleans()),
    st.builds(_with_closure, NUMBERS, st.integers(0, 20), st.sampled_from([False, False, True])),
)
ACTIONS = st.one_of(
    RIGHT, RIGHT, RIGHT, WRONG, STEPS, STEPS, STEPS,
    st.builds(Write, NUMBERS, st.sampled_from(list(WRITES))),
    st.builds(Clear, NUMBERS, st.sampled_from(list(CLEARS))),
    st.builds(Schedule, NUMBERS),
    st.builds(Fill, NUMBERS),
    st.builds(Freeze, NUMBERS),
    st.builds(AddGroup, NUMBERS),
    st.just(Save()),
    st.just(Load()),
)  # fmt: skip
PAIRS = st.tuples(*[st.sampled_from(list(OPTIMIZERS))] * 2)


BLOCK, OVERFLOW, NAN = Block(0, (0,), (0,)), Block(0, (0,), (0,), True), Write(0, "nan by clipping")
BOTH = Block(0, (0, 1), (0, 1))
DELAYED = Block(5, (0,), (0,), how="delayed")
# Programs that were wrong once, and some that few draws have.
FOUND: list[list[Any]] = [
    [Block(0, (0, 1), (0,)), Step(0), Step(1)],
    [BLOCK, Block(0, (0,), (0,), how="late")],
    [_with_closure(0, 0, True), BOTH, Step(1)],
    [Block(0, (0,), (1,)), Write(0, "clip")],
    [OVERFLOW, Clear(0, "optimizer"), _with_closure(0, 0, False)],
    [OVERFLOW, _with_closure(0, 0, False), Step(0)],
    [BLOCK, NAN, BOTH, Step(1)],
    [BLOCK, NAN, Step(0)],
    [BLOCK, NAN, Step(0), BLOCK, Step(0)],
    [BLOCK, Step(0), NAN, BOTH, Step(1)],
    [BLOCK, Step(0), Fill(0), BLOCK, Step(0)],
    [BLOCK, NAN, Step(0), BLOCK, BLOCK, Block(11, (0,), (0,)), Clear(0, "foreach"), Fill(0), Block(13, (1,), (0,)),
     Fill(1), Step(0), BOTH, Block(2, (0, 1), (0, 1)), _with_closure(0, 3, False)],
    [_with_closure(0, 1, False), _with_closure(0, 2, True), Step(0)],
    [BLOCK, AddGroup(0), Block(0, (0,), (1,)), BLOCK],
    [BLOCK, Step(0), Save(), BLOCK, Step(0), Load(), BLOCK, Step(0)],
    [BLOCK, Step(0, within=True), OVERFLOW, Step(0, within=True), BOTH, Step(0), Step(1)],
    [OVERFLOW, BOTH, Step(0), Step(1)],
    [OVERFLOW, BOTH, Step(1), BOTH, Step(0)],
    [OVERFLOW, BLOCK, BOTH, NAN, BOTH, Step(1), Step(0)],
    [Block(0, (0,), (0,), True, "delayed"), BOTH, Step(1), Step(0)],
    [Block(1, (0,), (0,), True, "delayed"), BOTH, Step(1), Step(0)],
    [Block(1, (0, 1), (0, 1), how="delayed"), BOTH, Step(1), Step(0)],
    [DELAYED, Step(0), DELAYED, BLOCK, Step(0), Block(5, (0,), (0,), True, "delayed"), Step(0)],
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", ["O0 O1", "O2", "O3 FP16_Optimizer", "auto_scale"])
@given(
    data=st.data(), makers=PAIRS, early=st.sampled_from([(), (0,), (0, 1)]),
    actions=st.lists(ACTIONS, min_size=3, max_size=14),
)  # fmt: skip
def test_a_step_is_right_or_refused(
    names: str, data: Any, makers: tuple[str, str], early: Sequence[int], actions: list[Any]
) -> None:
    dtypes, scales = st.sampled_from([torch.float16, torch.bfloat16]), st.sampled_from(["dynamic", 128.0, 1.0])
    way = data.draw(st.builds(Way, st.sampled_from(names.split()), dtypes, scales))
    if way.name == "auto_scale":
        # Both optimizers have a guard there, and the one within may skip a step later than the other.
        makers = tuple("SGD" if name == "SGD in a wrapper" else name for name in makers)  # type: ignore[assignment]
    run(way, makers, early, actions if way.checks else without_overflows(actions))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("makers", "early"),
    [(("SGD", "SGD"), ()), (("SGD", "SGD"), (0,)), (("AdamW", "SGD"), ()), (("SGD in a wrapper", "SGD"), ())],
)
@pytest.mark.parametrize("way", ["O1", "O2", "auto_scale"])
def test_programs_that_were_wrong_once_are_right_or_refused(
    way: str, makers: tuple[str, str], early: Sequence[int]
) -> None:
    if way == "auto_scale" and "SGD in a wrapper" in makers:
        return
    for actions in FOUND:
        run(Way(way), makers, early, actions)
        run(Way(way, scale=1.0), makers, early, without_overflows(actions))
