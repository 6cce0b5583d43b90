"""Programs that write to what the optimizer steps, outside of its step, beside masters that a program keeps itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.fp16_utils import FP16_Optimizer
from tests.core.stepping.networks import backward, data, equal, network, o2


@pytest.fixture(autouse=True)
def compiles_anew() -> Iterator[None]:
    """Leave nothing compiled: the limit of compilations is one for all models with the same code."""
    yield
    torch._dynamo.reset()


# What a program trains: its optimizer, a pass that clears and makes gradients, and the outputs of the model.
Optimizer = Callable[[list[Tensor]], Any]
Training = tuple[Any, Callable[[int], None], Callable[[], Tensor]]


class SAM(torch.optim.Optimizer):
    """Steps by the gradients at the worst point nearby, as github.com/davda54/sam does."""

    def __init__(self, params: Any, rho: float = 0.5) -> None:
        super().__init__(params, {"rho": rho, "lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def ascend(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=self.param_groups[0]["rho"] / float(norm))

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()

    def step(self, closure: Any = None) -> Any:
        self.ascend()
        with torch.enable_grad():
            closure()
        self.descend()


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose weights are the average in ``eval()``, and near the last iterate in ``train()``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.2, "k": 0, "beta": 0.5})

    def _move(self, weight: Callable[[float], float]) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))

    def eval(self) -> None:
        self._move(lambda beta: 1 - 1 / beta)

    def train(self) -> None:
        self._move(lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 1 / group["k"]).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def _params(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


# Each yields outputs of the model where a program would look at them.


def _sam(optimizer: Any, run: Callable[[int], None], outputs: Callable[[], Tensor]) -> Iterator[Tensor]:
    for step in range(4):
        run(step)
        optimizer.ascend()
        yield outputs()
        run(step)
        optimizer.descend()
        yield outputs()


def _sam_by_closure(optimizer: Any, run: Callable[[int], None], outputs: Callable[[], Tensor]) -> Iterator[Tensor]:
    for step in range(4):
        run(step)
        optimizer.step(lambda step=step: run(step))
        yield outputs()


def _schedule_free(optimizer: Any, run: Callable[[int], None], outputs: Callable[[], Tensor]) -> Iterator[Tensor]:
    for step in range(4):
        optimizer.train()
        run(step)
        optimizer.step()
        yield outputs()
        optimizer.eval()
        yield outputs()


def _averages(optimizer: Any, run: Callable[[int], None], outputs: Callable[[], Tensor]) -> Iterator[Tensor]:
    averages = [p.detach().clone() for p in _params(optimizer)]
    for step in range(4):
        run(step)
        optimizer.step()
        torch._foreach_lerp_(averages, [p.detach() for p in _params(optimizer)], 0.25)
        kept = [p.detach().clone() for p in _params(optimizer)]
        with torch.inference_mode():
            for p, average in zip(_params(optimizer), averages, strict=True):
                p.copy_(average)
            yield outputs()
        for p, value in zip(_params(optimizer), kept, strict=True):
            p.data = value
        yield outputs()


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "SAM": (SAM, _sam),
    "SAM, a closure": (SAM, _sam_by_closure),
    "ScheduleFree": (ScheduleFree, _schedule_free),
    "averages": (_sgd, _averages),
}


def _by_hand(make: Optimizer, begin: torch.dtype) -> Training:
    """Masters of the program's own, which it copies to the model before each call."""
    model = network().to(begin)
    copies = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    model.half()

    def call(inputs: Tensor) -> Tensor:
        for param, copied in zip(model.parameters(), copies, strict=True):
            param.data.copy_(copied.data)
        return model(inputs.half()).float()

    def run(seed: int) -> None:
        model.zero_grad()
        inputs, targets = data(seed)
        (mse_loss(call(inputs), targets) * 8).backward()
        for param, copied in zip(model.parameters(), copies, strict=True):
            copied.grad = param.grad.float() / 8  # type: ignore[union-attr]

    return make(copies), run, torch.no_grad()(lambda: call(data()[0]))


def _o2(make: Optimizer, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Training:
    model = network()
    optimizer = make(list(model.parameters()))
    o2(model, optimizer)
    called = wrap(model)

    def run(seed: int) -> None:
        optimizer.zero_grad()
        inputs, targets = data(seed)
        with autoamp.scale_loss(mse_loss(called(inputs), targets), optimizer) as scaled:
            scaled.backward()

    def outputs() -> Tensor:
        # Dynamo compiles nothing for half parameters that have fp32 gradients.
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        found = called(data()[0])
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        return found

    return optimizer, run, torch.no_grad()(outputs)


def _fp16_optimizer(make: Optimizer, wrap: Any) -> Training:
    model = network().half()
    wrapped = FP16_Optimizer(make(list(model.parameters())), static_loss_scale=8.0)

    def run(seed: int) -> None:
        wrapped.zero_grad()
        inputs, targets = data(seed)
        wrapped.backward(mse_loss(model(inputs.half()).float(), targets))

    def outputs() -> Tensor:
        wrap(wrapped)
        return model(data()[0].half()).float()

    return wrapped.optimizer, run, torch.no_grad()(outputs)


def _compiled(backend: str) -> Callable[[nn.Module], nn.Module]:
    return lambda model: torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[return-value]


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "nested": lambda model: nn.Sequential(model),
    "compiled by eager": _compiled("eager"),
    "compiled by aot_eager": _compiled("aot_eager"),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("name", PROGRAMS)
def test_o2_trains_as_with_masters_by_hand(name: str, wrapped: str) -> None:
    make, program = PROGRAMS[name]
    assert equal(list(program(*_o2(make, WRAPPED[wrapped]))), list(program(*_by_hand(make, torch.float32))))


@pytest.mark.parametrize("name", PROGRAMS)
def test_fp16_optimizer_trains_as_with_masters_by_hand(name: str) -> None:
    make, program = PROGRAMS[name]
    training = _fp16_optimizer(make, lambda optimizer: optimizer.model_from_masters())
    assert equal(list(program(*training)), list(program(*_by_hand(make, torch.float16))))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", PROGRAMS)
def test_masters_of_a_distributed_model(name: str) -> None:
    make, program = PROGRAMS[name]
    training = _o2(make, nn.parallel.DistributedDataParallel)
    assert equal(list(program(*training)), list(program(*_by_hand(make, torch.float32))))


@pytest.mark.usefixtures("one_process")
def test_masters_of_a_sharded_model() -> None:
    model = network()
    o2(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
    optimizer = ScheduleFree(model.parameters())

    def run(seed: int) -> None:
        optimizer.zero_grad()
        inputs, targets = data(seed)
        with autoamp.scale_loss(mse_loss(model(inputs), targets), optimizer) as scaled:
            scaled.backward()

    found = list(_schedule_free(optimizer, run, torch.no_grad()(lambda: model(data()[0]))))
    assert all(type(p).__name__ == "DTensor" for p in _params(optimizer))
    assert equal(found, list(_schedule_free(*_by_hand(ScheduleFree, torch.float16))))
    with torch.no_grad():
        _params(optimizer)[0].to_local().fill_(0.5)
    model(data()[0])
    assert model[0].weight.to_local().eq(0.5).all()


# Torch reports all writes but those through `.data`.
WRITES: dict[str, Callable[[Tensor], object]] = {
    "copy": lambda p: p.copy_(torch.full_like(p, 0.3)),
    "foreach": lambda p: torch._foreach_copy_([p], [torch.full_like(p, 0.3)]),
    "new data": lambda p: setattr(p, "data", torch.full_like(p, 0.3)),
    "data": lambda p: p.data.fill_(0.3),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_reaches_the_model_before_its_next_call(write: str, steps: int, mode: Any) -> None:
    model = network()
    one, two = _sgd(model.parameters()), _sgd(model[0].parameters())
    o2(model, one, two)
    for step in range(steps):
        backward(model, [one, two], step)
        one.step()
        two.step()
    before = model[0].weight.detach().clone()
    with mode():
        WRITES[write](_params(two)[0])
    if write == "data":
        model(data()[0])
        assert torch.equal(model[0].weight, before)
        autoamp.current_handle().model_from_masters()  # type: ignore[union-attr]
    else:
        assert torch.equal(model.state_dict()["0.weight"], torch.full((8, 4), 0.3))
        assert torch.equal(model[0].weight, before)
        with mode():
            model.eval()(data()[0])
    assert torch.equal(model[0].weight, torch.full((8, 4), 0.3).half())
    assert torch.equal(_params(one)[0], torch.full((8, 4), 0.3))
    # The low bits stay, also where the first step reads what programs write to half parameters through `.data`.
    assert torch.equal(model.state_dict()["0.weight"], torch.full((8, 4), 0.3))
    for optimizer in (one, two):
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    backward(model, [one, two])
    one.step()
    assert torch.equal(model.state_dict()["0.weight"], torch.full((8, 4), 0.3))


def test_where_both_were_written_the_master_stays() -> None:
    model = network()
    optimizer = _sgd(model.parameters())
    o2(model, optimizer)
    backward(model, optimizer)
    optimizer.step()
    for look in (lambda: model.state_dict(), lambda: model(data()[0])):
        with torch.no_grad():
            model[0].weight.fill_(2.0)
            _params(optimizer)[0].fill_(1.0)
        look()
        assert torch.equal(model.state_dict()["0.weight"], torch.ones(8, 4))
        model(data()[0])
        assert torch.equal(model[0].weight, torch.ones(8, 4).half())
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    assert torch.equal(model.state_dict()["0.weight"], torch.full((8, 4), 2.0))


class _Copies(TorchDispatchMode):
    """Counts the tensors that are written to by copies."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_foreach_copy_":
            self.count += len(args[0])
        return func(*args, **(kwargs or {}))


def test_what_was_not_written_is_not_copied() -> None:
    model = network()
    optimizer = _sgd(model.parameters())
    o2(model, optimizer)
    for write, copies in ((False, 0), (True, 1), (False, 0)):
        backward(model, optimizer)
        optimizer.step()
        if write:
            with torch.no_grad():
                _params(optimizer)[1].zero_()
        for expected in (copies, 0):
            with _Copies() as mode:
                model(data()[0])
            assert mode.count == expected


@pytest.mark.parametrize("active", [True, False])
def test_an_fp16_optimizer_looks_with_a_handle_and_refuses_without(active: bool) -> None:
    model = network().half()
    optimizer = FP16_Optimizer(_sgd(model.parameters()), static_loss_scale=8.0)
    inputs = data()[0].half()
    handle = autoamp.init(enabled=active, device_type="cpu", dtype=torch.float16)
    for clears in (False, True):
        with torch.no_grad():
            _params(optimizer)[0].zero_()
        if clears:
            optimizer.zero_grad()
        loss = model(inputs).float().sum()
        if active or clears:
            optimizer.backward(loss)
            assert not model[0].weight.any()
        else:
            with pytest.raises(autoamp.UsageError, match=r"optimizer.model_from_masters\(\) after the write"):
                optimizer.backward(loss)
        with torch.no_grad():
            _params(optimizer)[0].fill_(1.0)
        optimizer.model_from_masters()
        assert torch.equal(model[0].weight, torch.ones(8, 4).half())
        optimizer.backward(model(inputs).float().sum())
    handle.deactivate()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("bad", ["first pass", "second pass"])
def test_an_optimizer_within_another_skips_by_the_checks_of_that_one(bad: str, level: str) -> None:
    model = network()
    optimizer = SAM(list(model.parameters()))
    model, optimizer = autoamp.initialize(
        model, optimizer, opt_level=level, dtype=torch.float16, device_type="cpu", verbosity=0
    )

    def run(seed: int, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        inputs, targets = data(seed)
        with autoamp.scale_loss(mse_loss(model(inputs).float(), targets.float()) * factor, optimizer) as scaled:
            scaled.backward()

    def step(seed: int, bad: str = "") -> None:
        run(seed, torch.inf if bad == "first pass" else 1.0)
        optimizer.ascend()
        run(seed, torch.inf if bad == "second pass" else 1.0)
        optimizer.descend()

    step(0)
    before = [param.detach().clone() for param in _params(optimizer)]
    step(1, bad)
    if bad == "second pass":
        assert all(map(torch.equal, before, _params(optimizer)))
        assert autoamp.current_handle().skipped_steps == 1  # type: ignore[union-attr]
    assert all(bool(param.isfinite().all()) for param in _params(optimizer))
    step(2)
    assert not any(map(torch.equal, before, _params(optimizer)))
    assert all(bool(param.isfinite().all()) for param in _params(optimizer))


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_follow_the_step_of_an_optimizer_within_another(dtype: torch.dtype, scale: float) -> None:
    model = network()
    model, optimizer = autoamp.initialize(
        model, SAM(list(model.parameters())), opt_level="O2", dtype=dtype, device_type="cpu", loss_scale=scale,
        verbosity=0,
    )  # fmt: skip
    for seed in range(2):
        for step in (optimizer.ascend, optimizer.descend):
            optimizer.zero_grad()
            inputs, targets = data(seed)
            with autoamp.scale_loss(mse_loss(model(inputs).float(), targets.float()), optimizer) as scaled:
                scaled.backward()
            step()
        # Before any call of the module: an average of weights is taken here.
        assert equal(list(model.parameters()), [param.to(dtype) for param in _params(optimizer)])
    assert autoamp.current_handle().stats["steps"] == 2  # type: ignore[union-attr]
