"""Casts within calls of modules, and of half arguments anywhere: ``init(scope="modules")``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import autoamp
from autoamp.core import Handle, ScopedCasts, runtime_of
from autoamp.errors import UsageError
from tests.core.modules.watches import Calls


@pytest.fixture
def handle(half: torch.dtype) -> Iterator[Handle]:
    """Return a handle that casts by module."""
    made = autoamp.init(dtype=half, device_type="cpu", scope="modules")
    assert isinstance(made, Handle)
    yield made
    made.deactivate()


def casts_of(handle: Handle) -> ScopedCasts:
    assert isinstance(runtime_of(handle).casts, ScopedCasts)
    return runtime_of(handle).casts


class Probe(nn.Module):
    """Notes the dtypes of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        self.seen = [inner.dtype, (x @ x.t()).dtype]
        return self.second(inner)


def test_outside_of_modules_nothing_is_cast(handle: Handle, half: torch.dtype) -> None:
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.full((64, 8), 100.0) + torch.randn(64, 8)

    def results() -> list[Tensor]:
        """Of weights, statistics and projections."""
        products = [x @ weight, F.linear(x, weight), torch.einsum("ij,jk->ik", x, weight), F.softmax(x, -1)]
        return [*products, x.t() @ x, torch.einsum("ij,ik->jk", x, x), torch.linalg.qr(x).Q @ x.t()[:, :8].t()]

    made = results()
    # Nor after a call, as in a constructor that tries a part of its module before it computes a table.
    nn.Linear(8, 8)(x)
    made += results()
    assert made[0].requires_grad
    assert (x.to(half) @ weight).dtype is half
    handle.deactivate()
    assert all(torch.equal(one, other) for one, other in zip(made, results() * 2, strict=True))


def test_a_call_of_a_module_is_cast_and_its_output_is_fp32(handle: Handle, half: torch.dtype) -> None:
    model = Probe()
    with handle.count() as counts:
        output = model(torch.ones(2, 4))
    assert model.seen == [half, half]
    assert output.dtype is torch.float32
    assert counts.by_dtype() == {str(half).removeprefix("torch."): 3}
    with torch.no_grad():
        assert model(torch.ones(2, 4)).dtype is torch.float32
    assert model.seen == [half, half]


def test_outputs_in_containers_are_fp32(handle: Handle) -> None:
    model = Calls(lambda x: {"a": x @ x, "b": [(x @ x).int(), (x @ x, None)], "c": x.double()})
    found = model(torch.ones(2, 2))
    integers, (within, _) = found["b"]
    dtypes = [tensor.dtype for tensor in (found["a"], integers, within, found["c"])]
    assert dtypes == [torch.float32, torch.int32, torch.float32, torch.float64]


CALLS: dict[str, Any] = {
    "product": lambda x: x @ x,
    "layer": lambda x: F.linear(x, torch.ones(4, 4), torch.ones(4)),
    "sum of products": lambda x: torch.addmm(x, x, x),
    "casting": lambda x: torch.einsum("ij,jk->ik", x, x),
    "softmax": lambda x: F.log_softmax(x, -1),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "loss": lambda x: F.cross_entropy(x, torch.arange(4)),
    "fp32": lambda x: torch.linspace(1, 2, 4) * torch.erfinv(x / 10),
    "promote": lambda x: torch.addcmul(x, torch.ones(4, 4), x),
    "in place": lambda x: x.clone().exp_(),
    "composite": lambda x: F.smooth_l1_loss(x, torch.ones(4, 4)),
}


def test_every_kind_of_replacement_asks_its_arguments(half: torch.dtype) -> None:
    def dtypes(dtype: torch.dtype, requires_grad: bool = False) -> dict[str, torch.dtype]:
        arguments = {name: torch.ones(4, 4, dtype=dtype, requires_grad=requires_grad) for name in CALLS}
        return {name: call(arguments[name]).dtype for name, call in CALLS.items()}

    plain, found = dtypes(torch.float32), []
    for scope in ("global", "modules"):
        handle = autoamp.init(dtype=half, device_type="cpu", scope=scope)
        with handle.count() as counts:
            found.append((dtypes(half), counts.as_dict()))
            outside = dtypes(torch.float32, requires_grad=True)
        if scope == "modules":
            assert found[1][1] == counts.as_dict()
            assert dtypes(torch.float32) == plain == outside
        handle.deactivate()
    assert found[0] == found[1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("in_module", [False, True])
def test_checkpoints_recompute_as_they_computed(handle: Handle, reentrant: bool, in_module: bool) -> None:
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(4, 8, requires_grad=True)
    seen: list[torch.dtype] = []

    def block(x: Tensor) -> Tensor:
        table = torch.ones(8, 8).tril() @ torch.ones(8, 8).triu()
        y = x @ weight
        seen.extend([table.dtype, y.dtype])
        return F.softmax(y, -1) @ table

    def checkpointed(x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=reentrant)

    run = Calls(checkpointed) if in_module else checkpointed
    run(x).sum().backward()
    assert len(seen) == 4
    assert seen[:2] == seen[2:]
    expected, x.grad, weight.grad = (x.grad, weight.grad), None, None
    (Calls(block) if in_module else block)(x).sum().backward()
    torch.testing.assert_close((x.grad, weight.grad), expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_module_that_is_checkpointed_outside_of_modules_gives_fp32(handle: Handle, reentrant: bool) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8, requires_grad=True)
    out = checkpoint(model, x, use_reentrant=reentrant)
    assert out.dtype == torch.float32
    assert torch.equal(out, model(x))
    weights = list(model.parameters())
    checkpoint_sequential(model, 2, x, use_reentrant=reentrant).sum().backward()
    expected = torch.autograd.grad(model(x).sum(), weights)
    torch.testing.assert_close([weight.grad for weight in weights], list(expected), rtol=1e-2, atol=1e-2)


def test_threads_have_their_own_calls(handle: Handle, half: torch.dtype) -> None:
    model, x, seen = Probe(), torch.ones(4, 4), []

    def other() -> None:
        seen.append((x @ x).dtype)
        model(x)
        seen.append((x @ x).dtype)

    def in_thread() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    Calls(in_thread)()
    assert seen == [torch.float32, torch.float32]
    assert model.seen == [half, half]
    assert (x @ x).dtype is torch.float32


def test_blocks_go_over_the_scope(handle: Handle, half: torch.dtype) -> None:
    x, model = torch.ones(2, 2), Probe()
    with handle.disable_casts():
        model(torch.ones(2, 4))
        assert model.seen == [torch.float32] * 2
        assert F.linear(x, nn.Parameter(x)).dtype is torch.float32
    with autoamp.region():
        assert (x @ x).dtype is half
        nn.Linear(2, 2)
        assert (x @ x).dtype is half
    assert (x @ x).dtype is torch.float32


def test_within_autocast_outputs_are_torchs(handle: Handle, half: torch.dtype) -> None:
    model = Probe()
    with torch.autocast("cpu", dtype=half):
        assert model(torch.ones(2, 4)).dtype is half
    with torch.autocast("cpu", enabled=False):
        assert model(torch.ones(2, 4)).dtype is torch.float32
        assert model.seen == [torch.float32] * 2


@pytest.mark.parametrize("precision", ["fp32", "fp16", "none"])
def test_precision_by_module_goes_over_the_scope(handle: Handle, half: torch.dtype, precision: str) -> None:
    model = Probe()
    with handle.override(model, precision):
        assert model(torch.ones(2, 4)).dtype is torch.float32
    assert model.seen == [half if precision == "fp16" else torch.float32] * 2


def test_a_closure_casts_as_around_the_step(handle: Handle, half: torch.dtype) -> None:
    model, tables = Probe(), []
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    handle.auto_scale()

    def closure() -> Tensor:
        optimizer.zero_grad()
        tables.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert model.seen == [half, half]
    assert set(tables) == {torch.float32}


def test_recurrent_layers_take_half_inputs(handle: Handle) -> None:
    output, (state, _) = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))(torch.ones(3, 2, 4))
    assert (output.dtype, state.dtype) == (torch.float32, torch.float32)


# -- programs that compute in half precision themselves --


def test_a_step_before_any_model_was_cast_says_nothing_of_half_models(handle: Handle) -> None:
    handle.auto_scale()
    model = Probe().half()
    model.first.weight.grad = torch.zeros_like(model.first.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(2, 4, dtype=torch.float16))
    assert casts_of(handle).yielded_to == "Probe in float16"


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(UsageError, match="scope='module' is unknown; choose 'global' or 'modules'"):
        autoamp.init(scope="module")
