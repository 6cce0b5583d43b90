"""A step of a model as users of autoamp write it, and as users of torch.amp do, and what each costs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp
from autoamp.optimizers import FusedAdam, FusedLAMB, FusedSGD
from tests.null_cuda.device import Cost, held, spent
from tests.null_cuda.models import BATCH, MODELS, WIDTH, Batch
from tests.saved import SavedTensors

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Steps before the one that counts: states, caches and what is learnt of a loop are there by then.
WARM_UP = 4
# The scale, its inverse and some flags are blocks of their own; a scaled loss saves the scale, four bytes of it.
SCALARS = 4 * 512
SCALE = 4

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW-fused": functools.partial(torch.optim.AdamW, fused=True),
    "AdamW-foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "AdamW-capturable": functools.partial(torch.optim.AdamW, capturable=True),
    "FusedAdam": FusedAdam,
    "FusedSGD": functools.partial(FusedSGD, lr=0.1, momentum=0.9),
    "FusedLAMB": FusedLAMB,
    "FP16_Optimizer": torch.optim.Adam,
}
LEVELS = ("O0", "O1", "O2", "O3")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compared, by names.

    Attributes:
        model: A key of `models.MODELS`.
        half: ``"fp16"`` or ``"bf16"``.
        level: ``"init"`` for `autoamp.init` with `scale_loss`, an opt level, ``"by_hand"`` for a model in half
            precision under an `FP16_Optimizer`, or ``"inference"``.
        optimizer: A key of `OPTIMIZERS`; empty for inference.
    """

    model: str
    half: str
    level: str
    optimizer: str

    def __str__(self) -> str:
        return "-".join(filter(None, (self.model, self.half, self.level, self.optimizer)))


def all_cases() -> Iterator[Case]:
    """Yield all that is compared. An FP16_Optimizer has masters and a scaler of its own, and no opt level takes it."""
    for model, half in itertools.product(MODELS, HALVES):
        for level, optimizer in itertools.product(("init", *LEVELS), OPTIMIZERS):
            if optimizer != "FP16_Optimizer":
                yield Case(model, half, level, optimizer)
        yield Case(model, half, "init", "FP16_Optimizer")
        yield Case(model, half, "by_hand", "FP16_Optimizer")
        yield Case(model, half, "inference", "")


@dataclasses.dataclass(frozen=True)
class Found:
    """What a step in its steady state came to.

    Attributes:
        output: The dtype of what the model returns.
        gradients: The dtype of each gradient that the optimizer steps by, of masters where there are some.
        saved: Bytes saved for the backward pass by dtype, each storage once, parameters apart.
        cost: What it cost; of the peak what was held beside it is taken away.
    """

    output: torch.dtype
    gradients: tuple[torch.dtype | None, ...]
    saved: dict[torch.dtype, int]
    cost: Cost


class Step:
    """A training step or a forward pass; ``run`` does it, and keeps what the model returned."""

    def __init__(self, model: nn.Module, run: Callable[[], Tensor], optimizer: Any = None) -> None:
        self.model, self.optimizer = model, optimizer
        self._run = run
        self.output: torch.dtype = torch.float32

    def gradients(self) -> tuple[torch.dtype | None, ...]:
        """Return the dtype of each gradient that the optimizer steps by."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        return tuple(None if param.grad is None else param.grad.dtype for param in params)

    def __call__(self) -> None:
        self.output = self._run().dtype


Way = Callable[[Batch, torch.dtype], contextlib.AbstractContextManager[Step]]


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy of a batch, over words or images."""
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def training(batch: Batch, optimizer: Any, stepped: Callable[[Tensor], None], around: Any = None) -> Step:
    """Return a training step: its forward pass within ``around()``, its backward pass and its step by ``stepped``."""
    model, x, y = batch

    def run() -> Tensor:
        optimizer.zero_grad()
        with around() if around is not None else contextlib.nullcontext():
            output = model(x)
            loss = loss_of(output, y)
        stepped(loss)
        return output.detach()

    return Step(model, run, optimizer)


def forward(batch: Batch, around: Any = contextlib.nullcontext) -> Step:
    """Return a forward pass without gradients."""
    model, x, _ = batch

    def run() -> Tensor:
        with torch.no_grad(), around():
            return model(x)

    return Step(model.eval(), run)


class Halved(nn.Module):
    """A model that was cast by hand, as programs did it before there was anything else: half inside, fp32 outside."""

    def __init__(self, model: nn.Module, half: torch.dtype, *, keep_norms: bool) -> None:
        super().__init__()
        self.model, self.half = model.to(half), half
        for module in model.modules() if keep_norms else ():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.to(self.half) if x.is_floating_point() else x).float()


@contextlib.contextmanager
def torch_amp(optimizer: str, batch: Batch, half: torch.dtype, *, enabled: bool = True) -> Iterator[Step]:
    """Train under torch.autocast, with a GradScaler where ours has one; plainly in fp32 where it is not enabled."""
    made = OPTIMIZERS[optimizer](batch[0].parameters())
    scaled = half is torch.float16 or optimizer == "FP16_Optimizer"
    scaler: Any = torch.amp.GradScaler("cuda", enabled=enabled and scaled)

    def stepped(loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.step(made)
        scaler.update()

    yield training(batch, made, stepped, functools.partial(torch.autocast, "cuda", dtype=half, enabled=enabled))


@contextlib.contextmanager
def torch_inference(batch: Batch, half: torch.dtype) -> Iterator[Step]:
    """Run forward passes under torch.autocast."""
    yield forward(batch, functools.partial(torch.autocast, "cuda", dtype=half))


@contextlib.contextmanager
def cast_by_hand(batch: Batch, half: torch.dtype, *, keep_norms: bool) -> Iterator[Step]:
    """Train a model that was cast by hand, for its dtypes."""
    model, x, y = batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def stepped(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()

    yield training((Halved(model, half, keep_norms=keep_norms), x, y), optimizer, stepped)


@contextlib.contextmanager
def ours(case: Case, batch: Batch, half: torch.dtype) -> Iterator[Step]:
    """Train, or infer, with autoamp."""
    model, x, y = batch
    if case.level == "by_hand":
        batch = Halved(model, half, keep_norms=False), x, y
    made: Any = OPTIMIZERS[case.optimizer](model.parameters()) if case.optimizer else None
    own_scaler = case.optimizer == "FP16_Optimizer"
    if own_scaler:
        made = autoamp.FP16_Optimizer(made, dynamic_loss_scale=True, verbose=False)
    if case.level in LEVELS:
        autoamp.initialize(model, made, opt_level=case.level, dtype=half, device_type="cuda", verbosity=0)
    elif case.level != "by_hand":
        autoamp.init(dtype=half, device_type="cuda")
    handle: Any = autoamp.current_handle()

    def stepped(loss: Tensor) -> None:
        if own_scaler:
            made.backward(loss)
        else:
            with handle.scale_loss(loss, made) as scaled_loss:
                scaled_loss.backward()
        made.step()

    try:
        if case.level == "inference":
            with handle.inference(model):
                yield forward(batch)
        else:
            yield training(batch, made, stepped)
    finally:
        if handle is not None:
            handle.deactivate()


def measured(make: Callable[[], Batch], half: torch.dtype, way: Way) -> Found:
    """Return what a step comes to, on a model made anew from one seed."""
    open_libraries()
    torch.manual_seed(0)
    gc.collect()
    before = _settled()
    with torch.device("cuda"):
        batch = make()
    with way(batch, half) as step:
        del batch
        for _ in range(WARM_UP):
            step()
        _settled()
        cost = spent(step)
        gradients = step.gradients()
        with SavedTensors(step.model.parameters()) as saved:
            step()
        return Found(step.output, gradients, saved.bytes_by_dtype(), dataclasses.replace(cost, peak=cost.peak - before))


def _settled() -> int:
    """Return the bytes that are held once autograd's thread has dropped what the last backward pass left to it.

    It drops that after the pass has returned, at the latest before it takes up the next one.
    """
    torch.zeros(1, device="cuda", requires_grad=True).sum().backward()
    return held()


@functools.cache
def open_libraries() -> None:
    """Let cuBLAS take the memory that it keeps, for forward passes and for the thread of backward ones."""
    layer = nn.Linear(WIDTH, WIDTH, device="cuda")
    x = torch.zeros(BATCH, WIDTH, device="cuda", requires_grad=True)
    for half in HALVES.values():
        with torch.autocast("cuda", dtype=half):
            layer(x).sum().backward()
    torch.autograd.backward(layer(x).sum())


def own(case: Case) -> Found:
    """Return what autoamp's step comes to."""
    return measured(MODELS[case.model], HALVES[case.half], functools.partial(ours, case))


@functools.cache
def torchs(model: str, half: str, optimizer: str, *, enabled: bool) -> Found:
    """Return what torch's step comes to with the same optimizer, the inner one in place of an `FP16_Optimizer`."""
    way = functools.partial(torch_amp, optimizer, enabled=enabled) if optimizer else torch_inference
    return measured(MODELS[model], HALVES[half], way)


@functools.cache
def by_hand(model: str, half: str, *, keep_norms: bool) -> Found:
    """Return what a step of a model that was cast by hand comes to."""
    return measured(MODELS[model], HALVES[half], functools.partial(cast_by_hand, keep_norms=keep_norms))


def differences(case: Case) -> dict[str, str]:
    """Return what is not as it should be, by name: dtypes that are others, costs that are more than torch's.

    Costs are beside torch.autocast, in fp16 and for an `FP16_Optimizer` with a GradScaler, and at O0 beside plain fp32.
    The dtypes of O2, O3 and of an `FP16_Optimizer` over a half model are those of a model cast by hand, but for
    gradients of masters.
    """
    theirs = torchs(case.model, case.half, case.optimizer, enabled=case.level != "O0")
    like = theirs
    if case.level in ("O2", "O3", "by_hand"):
        like = by_hand(case.model, case.half, keep_norms=case.level == "O2")
    if case.level in ("O2", "by_hand"):
        like = dataclasses.replace(like, gradients=theirs.gradients)
    try:
        found = own(case)
    except Exception as error:  # whatever is raised where torch runs is what is to be known
        return {"raises": repr(error)}
    # Without a loss scale the loss is looked at for inf and nan, which torch does not do.
    is_scaled = case.optimizer == "FP16_Optimizer" or (case.half == "fp16" and case.level not in ("O0", "O3"))
    spare = {"peak": SCALARS} if is_scaled else {"peak": SCALARS, "launches": 3, "copies": 2}
    return dict(_unlike(found, like)) | dict(_dearer(found.cost, theirs.cost, spare))


def _unlike(found: Found, like: Found) -> Iterator[tuple[str, str]]:
    for name in ("output", "gradients"):
        if getattr(found, name) != getattr(like, name):
            yield name, f"{getattr(found, name)}, not {getattr(like, name)}"
    if found.saved.keys() - like.saved.keys() or sum(found.saved.values()) > sum(like.saved.values()) + SCALE:
        yield "saved", f"{found.saved}, not {like.saved}"


def _dearer(found: Cost, theirs: Cost, spare: dict[str, int]) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(Cost):
        if getattr(found, field.name) > getattr(theirs, field.name) + spare.get(field.name, 0):
            yield field.name, f"{getattr(found, field.name)}, more than {getattr(theirs, field.name)}"
