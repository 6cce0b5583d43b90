"""Programs that handle precision themselves, or do not. `test_own_precision` runs them in several ways.

``own_precision.py plain float16`` prints what each program noted, as JSON. With ``modules`` or ``global`` in place of
``plain`` it calls `autoamp.init` with that scope.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

import autoamp
import autoamp.compat

# The test imports the names of the programs.
WAY, HALF = sys.argv[1:3] if __name__ == "__main__" else ("plain", "bfloat16")
DTYPE: torch.dtype = getattr(torch, HALF)
X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 16).view(8, 2)
NOTES: list[Any] = []
# Apart from what the program itself sees, which autoamp does not change.
GRADIENT_SCALES: list[float] = []


def start() -> None:
    """Switch autoamp on, where the program does that."""
    if WAY != "plain":
        handle = autoamp.init(dtype=DTYPE, device_type="cpu", scope=WAY)
        if WAY == "modules":
            handle.auto_scale()


class Noted(torch.autograd.Function):
    """Notes a loss and its dtype, and the gradient that begins at it, which is the scale in effect."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        NOTES.append([str(loss.dtype), loss.item()])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        GRADIENT_SCALES.append(gradients[0].item())
        return gradients[0]


def noted(loss: Tensor) -> Tensor:
    """Note a loss."""
    result: Tensor = Noted.apply(loss)
    return result


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return a loss so small that no gradient overflows at a scale of 65536."""
    return F.mse_loss(model(x), y) / 8


class Net(nn.Module):
    """Notes the dtype that it computes in."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.last = layer or nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        NOTES.append(str(inner.dtype))
        normed = self.norm(inner.to(self.norm.weight.dtype)).relu()
        return self.last(normed.to(self.last.weight.dtype)).to(inner.dtype)


class Lora(nn.Module):
    """A frozen layer in half precision with fp32 adapters.

    Args:
        by_hand: Whether it casts by itself, as `peft` does.
    """

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(4, 8).to(DTYPE).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            return self.base(x.to(DTYPE)).float() + self.up(self.down(x))
        return self.base(x) + self.up(self.down(x))


class Masters:
    """Steps fp32 copies of half parameters by hand, with a loss scale of its own."""

    def __init__(self, model: nn.Module, scale: float = 64.0) -> None:
        self.params, self.scale = list(model.parameters()), scale
        self.masters = [param.detach().float().requires_grad_() for param in self.params]
        self.optimizer = torch.optim.SGD(self.masters, lr=0.4)

    def backward(self, loss: Tensor) -> None:
        (loss.float() * self.scale).backward()

    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = torch.zeros_like(master) if param.grad is None else param.grad.float() / self.scale
            param.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)


class Engine(nn.Module):
    """As DeepSpeed's: casts the model, and steps once at construction to allocate the optimizer's state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model.to(DTYPE)
        self.masters = Masters(self.module)
        self.masters.step()

    def forward(self, x: Tensor) -> Any:
        return self.module(x.to(DTYPE))


def train(model: nn.Module, *, x: Tensor = X, y: Tensor = Y, steps: int = 3) -> None:
    """Train a model whose parameters an optimizer steps."""
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.4)
    for _ in range(steps):
        optimizer.zero_grad()
        noted(loss_of(model, x, y)).backward()
        optimizer.step()


def train_by_hand(model: nn.Module, masters: Masters, *, x: Tensor = X, y: Tensor = Y) -> None:
    """Train a half model with masters."""
    for _ in range(3):
        masters.backward(noted(loss_of(model, x, y)))
        masters.step()


def train_scaled(scaler: Any, region: Any = contextlib.nullcontext) -> None:
    """Train with a GradScaler, the forward passes in a region."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    for _ in range(3):
        optimizer.zero_grad()
        with region():
            loss = noted(loss_of(model, X, Y))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


# -- programs --


def half_model_with_masters() -> None:
    model = Net().to(DTYPE)
    train_by_hand(model, Masters(model), x=X.to(DTYPE), y=Y.to(DTYPE))


def half_model_with_fp32_norm() -> None:
    """As `network_to_half` leaves a model: norms stay in fp32. The loss is taken in half precision."""
    model = Net()
    model.first.to(DTYPE)
    train_by_hand(model, Masters(model), x=X.to(DTYPE))


def engine() -> None:
    made = Engine(Net())
    train_by_hand(made, made.masters, y=Y.to(DTYPE))


def half_model_after_an_fp32_one() -> None:
    train(Net())
    NOTES.clear()
    GRADIENT_SCALES.clear()
    half_model_with_masters()
    train(Net())


def half_inference() -> None:
    model = Net().to(DTYPE)
    with torch.no_grad():
        for _ in range(2):
            logits = model(X.to(DTYPE))
            noted(F.softmax(logits, -1).square().sum())
            noted(nn.CrossEntropyLoss()(logits, Y.to(DTYPE)))


def frozen_half_teacher() -> None:
    """Two models, of which one is half, and casts between them by hand."""
    teacher, student = Net().to(DTYPE), Net()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.4)
    for _ in range(3):
        with torch.no_grad():
            wanted = F.softmax(teacher(X.to(DTYPE)), -1).float()
        optimizer.zero_grad()
        noted(loss_of(student, X, wanted)).backward()
        optimizer.step()


def autocast() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", DTYPE):
            loss = loss_of(model, X, Y)
        noted(loss + model(X).square().mean()).backward()
        optimizer.step()


def evaluated_between(evaluate: Callable[[nn.Module], object]) -> None:
    """Train, evaluate in half precision, and train on."""
    model = Net()
    train(model, steps=2)
    with torch.no_grad():
        evaluate(model)
    train(model, steps=1)


def scaler_unused() -> None:
    scaler = GradScaler("cpu")
    train(Net())
    del scaler


def scaler_early() -> None:
    """Made before autoamp is there, and kept."""
    scaler = GradScaler("cpu", init_scale=128.0)
    start()
    train_scaled(scaler)


def scaler_of_fsdp() -> None:
    """Its `scale` is not that of its base class."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = Net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.4), ShardedGradScaler("cpu", init_scale=128.0)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(noted(loss_of(model, X, Y))).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= 128.0
        optimizer.step()


def fp16_optimizer() -> None:
    model = Net().to(DTYPE)
    optimizer = autoamp.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.4), static_loss_scale=128.0)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(noted(loss_of(model, X.to(DTYPE), Y.to(DTYPE))).float())
        optimizer.step()


def apex_level(level: str) -> Callable[[], None]:
    """Return a program that calls `apex.amp.initialize`."""

    def program() -> None:
        if "apex" not in sys.modules:
            autoamp.compat.install_as_apex(dtype=DTYPE, device_type="cpu")
        from apex import amp

        model: Any = Net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.4)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(3):
            optimizer.zero_grad()
            loss = noted(loss_of(lambda x: model(x).float(), X, Y))
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()

    return program


EARLY = {"scaler_early": scaler_early}
"""Programs that switch autoamp on themselves, and scale their losses."""

OWN: dict[str, Callable[[], None]] = {
    "half_model": lambda: train(Net().to(DTYPE), x=X.to(DTYPE), y=Y.to(DTYPE)),
    "half_model_with_masters": half_model_with_masters,
    "half_model_with_fp32_norm": half_model_with_fp32_norm,
    "engine": engine,
    "half_model_after_an_fp32_one": half_model_after_an_fp32_one,
    "half_inference": half_inference,
    "frozen_half_teacher": frozen_half_teacher,
    # A table in half precision that trains, and casts by hand behind it.
    "half_embedding": lambda: train(Net(nn.Embedding(8, 8).to(DTYPE)), x=torch.arange(8)),
    "autocast": autocast,
    "autocast_and_scaler": lambda: train_scaled(GradScaler("cpu", 128.0), lambda: torch.autocast("cpu", DTYPE)),
    "fp16_optimizer": fp16_optimizer,
    **{f"apex_{level}": apex_level(level) for level in ("O0", "O1", "O2", "O3")},
}
"""Programs that handle precision themselves."""

CAST: dict[str, Callable[[], None]] = {
    "plain": lambda: train(Net()),
    "frozen_half_embedding": lambda: train(
        Net(nn.Sequential(nn.Embedding(8, 4).to(DTYPE).requires_grad_(False), nn.Linear(4, 8))), x=torch.arange(8)
    ),
    "lora": lambda: train(Net(Lora())),
    "lora_by_hand": lambda: train(Net(Lora(by_hand=True))),
    "half_copy_to_evaluate": lambda: evaluated_between(lambda _: Net().to(DTYPE)(X.to(DTYPE))),
    "autocast_to_evaluate": lambda: evaluated_between(torch.autocast("cpu", DTYPE)(lambda model: model(X))),
    "scaler_unused": scaler_unused,
}
"""Programs that do not."""

SCALED = {"scaler_alone": lambda: train_scaled(GradScaler("cpu", 128.0)), "scaler_of_fsdp": scaler_of_fsdp}
"""Programs that scale their losses, and cast nothing."""


def results() -> Iterator[tuple[str, Any]]:
    """Run each program in a process of its own, and give its name with what it noted, or its error."""
    programs = EARLY | OWN | CAST | SCALED
    for number, (name, program) in enumerate(programs.items()):
        if number == len(EARLY):
            start()
        reading, writing = os.pipe()
        if os.fork() == 0:
            torch.manual_seed(0)
            try:
                program()
                found: Any = NOTES
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            os.write(writing, json.dumps([found, GRADIENT_SCALES]).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as stream:
            yield name, json.load(stream)
        os.wait()


if __name__ == "__main__":
    print(json.dumps(dict(results())))
