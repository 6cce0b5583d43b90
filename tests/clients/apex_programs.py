"""Trains a small model through a library's own Apex path, as it is, with autoamp by the name of apex.

    python tests/clients/apex_programs.py ignite O1

The last line that it prints is a JSON object, which says how it went. In the fifth step the loss grows so much that the
gradients overflow: that step is to be skipped.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoamp import current_handle
from autoamp.compat import install_as_apex

STEP_OF_OVERFLOW = 5
EPOCHS = 4
FEATURES, CLASSES = 16, 3


@dataclass
class Outcome:
    """How a training went.

    Attributes:
        accuracy: The share of right answers on samples that were held out.
        logits: The dtype of what the model gave to the loss.
        gradient: The sum of the magnitudes of the first gradient of the logits, 2 at most where the loss is not scaled.
        skipped: How many steps were skipped.
        loss_scale: The scale at the end, as ``amp.state_dict()`` has it.
        stayed: Whether the weights were the same after the step of the overflow as before it.
        finite: Whether all weights are finite at the end.
    """

    accuracy: float
    logits: str
    gradient: float
    skipped: int
    loss_scale: float
    stayed: bool
    finite: bool


class Criterion(nn.Module):
    """Cross entropy of logits (N, classes) that takes notes, and overflows once while the model trains."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = list(model.parameters())
        self.calls = 0
        self.before: list[Tensor] = []
        self.stayed = False
        self.logits = ""
        self.gradients: list[float] = []

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(logits.float(), labels)
        if not torch.is_grad_enabled():
            return loss
        self.calls += 1
        if self.calls == 1:
            self.logits = str(logits.dtype)
            logits.register_hook(lambda gradient: self.gradients.append(gradient.double().abs().sum().item()))
        if self.calls == STEP_OF_OVERFLOW:
            self.before = [weight.detach().clone() for weight in self._weights]
            return loss * 1e36
        if self.calls == STEP_OF_OVERFLOW + 1:
            self.stayed = all(map(torch.equal, self._weights, self.before))
        return loss


@dataclass
class Task:
    """Data that a linear rule labels, and a model for them."""

    training: DataLoader[tuple[Tensor, ...]]
    testing: DataLoader[tuple[Tensor, ...]]
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def make(cls) -> Task:
        torch.manual_seed(0)
        x = torch.randn(1280, FEATURES)
        y = (x @ torch.randn(FEATURES, CLASSES)).argmax(1)
        model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        return cls(
            DataLoader(TensorDataset(x[:1024], y[:1024]), batch_size=64, shuffle=True),
            DataLoader(TensorDataset(x[1024:], y[1024:]), batch_size=64),
            model,
            torch.optim.Adam(model.parameters(), 1e-2),
        )

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Return the share of right answers on the samples for testing."""
        model.eval()
        right = [(model(x).argmax(1) == y).float() for x, y in self.testing]
        return torch.cat(right).mean().item()


def outcome(criterion: Criterion, model: nn.Module, accuracy: float) -> Outcome:
    from apex import amp

    handle: Any = current_handle()
    return Outcome(
        accuracy=accuracy,
        logits=criterion.logits,
        gradient=criterion.gradients[0],
        skipped=handle.skipped_steps,
        loss_scale=amp.state_dict()["loss_scaler0"]["loss_scale"],
        stayed=criterion.stayed,
        finite=all(bool(weight.isfinite().all()) for weight in model.parameters()),
    )


def train_with_ignite(opt_level: str) -> Outcome:
    """`create_supervised_trainer(amp_mode="apex")`."""
    from apex import amp
    from ignite.engine import create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Accuracy

    task = Task.make()
    model, optimizer = amp.initialize(task.model, task.optimizer, opt_level=opt_level)
    criterion = Criterion(model)
    trainer = create_supervised_trainer(model, optimizer, criterion, device="cpu", amp_mode="apex")
    trainer.run(task.training, max_epochs=EPOCHS)
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()}, device="cpu")
    return outcome(criterion, model, evaluator.run(task.testing).metrics["accuracy"])


def train_with_torchbearer(opt_level: str) -> Outcome:
    """`Trial.with_closure(apex_closure())`."""
    from apex import amp
    from torchbearer import Trial
    from torchbearer.bases import apex_closure

    task = Task.make()
    model, optimizer = amp.initialize(task.model, task.optimizer, opt_level=opt_level)
    criterion = Criterion(model)
    trial = Trial(model, optimizer, criterion, metrics=["acc"], verbose=0).to("cpu").with_closure(apex_closure())
    trial.with_generators(task.training, val_generator=task.testing)
    return outcome(criterion, model, trial.run(epochs=EPOCHS)[-1]["val_acc"])


def train_with_catalyst(opt_level: str) -> Outcome:
    """`dl.APEXEngine`, which calls ``amp.initialize`` and saves and loads ``amp.state_dict()`` by itself."""
    from catalyst import dl

    task = Task.make()
    criterion = Criterion(task.model)
    runner = dl.SupervisedRunner(input_key="features", output_key="logits", target_key="targets", loss_key="loss")
    with tempfile.TemporaryDirectory() as folder:
        runner.train(
            engine=dl.APEXEngine(device="cpu", apex_kwargs={"opt_level": opt_level}),
            model=task.model,
            criterion=criterion,
            optimizer=task.optimizer,
            loaders={"train": task.training, "valid": task.testing},
            num_epochs=EPOCHS,
            logdir=folder,
            valid_loader="valid",
            valid_metric="loss",
            minimize_valid_metric=True,
            load_best_on_end=False,
        )
    return outcome(criterion, runner.model, task.accuracy(runner.model))


def train_with_timm(opt_level: str) -> Outcome:
    """`ApexScaler`, as timm's training script calls it, with its gradient clipping."""
    from apex import amp

    if importable_only_with_its_ops("torchvision"):
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    from timm.layers import Mlp
    from timm.utils import ApexScaler

    task = Task.make()
    model: nn.Module = Mlp(FEATURES, 64, CLASSES)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    criterion, scaler = Criterion(model), ApexScaler()
    for _ in range(EPOCHS):
        model.train()
        for x, y in task.training:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            scaler(loss, optimizer, clip_grad=1.0, clip_mode="norm", parameters=model.parameters())
    state = scaler.state_dict()
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    return outcome(criterion, model, task.accuracy(model))


def importable_only_with_its_ops(name: str) -> bool:
    """Whether a library looks for C++ ops that it cannot load, as a torchvision for CUDA beside a CPU torch."""
    try:
        __import__(name)
    except RuntimeError:
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]
        return True
    return False


PROGRAMS: dict[str, Callable[[str], Outcome]] = {
    "catalyst": train_with_catalyst,
    "ignite": train_with_ignite,
    "timm": train_with_timm,
    "torchbearer": train_with_torchbearer,
}

if __name__ == "__main__":
    install_as_apex(device_type="cpu")
    print(json.dumps({level: asdict(PROGRAMS[sys.argv[1]](level)) for level in sys.argv[2:]}))
