"""Where half tensors of autoamp's making meet numpy, fp32 tensors and large numbers, within modules' calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp

MASK = torch.zeros(4, 4, dtype=torch.bool).index_fill_(0, torch.tensor([0]), True)
FIRST = torch.tensor([0])
BIG = -1e9


@pytest.fixture(autouse=True)
def handle(half: torch.dtype) -> Iterator[Any]:
    """Activate a handle that casts by module."""
    made = autoamp.init(dtype=half, device_type="cpu", scope="modules")
    yield made
    made.deactivate()


class Calls(nn.Module):
    """Calls a function with an fp32 tensor and one that a layer made."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        self.met: torch.dtype | None = None

    def forward(self, x: Tensor) -> Any:
        made = self.layer(x)
        self.met = made.dtype
        return self.function(torch.full((4, 4), 0.25), made)


def written(tensor: Tensor, index: Any, value: Any) -> Tensor:
    tensor = tensor.detach().clone()
    tensor[index] = value
    return tensor


CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rows of a mask": lambda w, x: written(w, MASK, x[MASK]),
    "rows of a list": lambda w, x: written(w, [0, 1], x[:2]),
    "a slice": lambda w, x: written(w, slice(2), x[:2]),
    "fp32 into half": lambda w, x: written(x, MASK, w[MASK]),
    "index_put_": lambda w, x: w.index_put_((FIRST,), x[:1]),
    "index_add_": lambda w, x: w.index_add_(0, FIRST, x[:1]),
    "index_copy_": lambda w, x: w.index_copy_(0, FIRST, x[:1]),
    "scatter_": lambda w, x: w.scatter_(1, MASK.long(), x),
    "scatter_add_": lambda w, x: w.scatter_add_(1, MASK.long(), x),
    "masked_scatter_": lambda w, x: w.masked_scatter_(MASK, x),
    "copy_": lambda w, x: w.copy_(x),
    "masked softmax": lambda w, x: F.softmax(x.masked_fill(MASK, BIG), -1),
    "masked softmax, in place": lambda w, x: F.softmax(x.clone().masked_fill_(MASK, BIG), -1),
    "masked softmax, written": lambda w, x: F.softmax(written(x, MASK, BIG), -1),
    "masked softmax, by columns": lambda w, x: F.softmax(torch.masked_fill(x, MASK.t(), BIG), -1),
    "masked by a tensor": lambda w, x: F.softmax(x.masked_fill(MASK.t(), torch.tensor(BIG)), -1),
    "full_like": lambda w, x: F.softmax(torch.where(MASK.t(), torch.full_like(x, BIG), x), -1),
    "new_full": lambda w, x: F.softmax(torch.cat([x, x.new_full((4, 1), BIG)], 1), -1),
    "fill_": lambda w, x: F.softmax(torch.cat([x, x.detach()[:, :1].clone().fill_(BIG)], 1), -1),
    "index_fill": lambda w, x: F.softmax(x.index_fill(1, FIRST, BIG), -1),
    "index_fill_": lambda w, x: F.softmax(x.clone().index_fill_(1, FIRST, BIG), -1),
    "pad": lambda w, x: F.softmax(F.pad(x, (1, 1), value=BIG), -1),
    "clamp": lambda w, x: x.clamp(min=BIG, max=-BIG),
    "clamp_": lambda w, x: x.clone().clamp_(BIG, -BIG),
    "embedding_bag": lambda w, x: F.embedding_bag(
        torch.arange(4), w, torch.tensor([0, 2]), mode="sum", per_sample_weights=x[0]
    ),
    "sparse.mm": lambda w, x: torch.sparse.mm(torch.eye(4).to_sparse(), x),
    "sparse @": lambda w, x: torch.eye(4).to_sparse() @ x,
    "numpy": lambda w, x: torch.from_numpy(x.detach().numpy() * 2),
    "asarray": lambda w, x: torch.from_numpy(np.asarray(x.detach())),
    "tolist": lambda w, x: torch.tensor(x.tolist()),
}


@pytest.mark.parametrize("case", CASES)
def test_what_runs_in_fp32_runs_in_a_module_and_gives_the_same(case: str, handle: Any, half: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Calls(CASES[case]), torch.randn(4, 4)
    found = model(x)
    assert model.met is half
    handle.deactivate()
    expected = model(x)
    assert found.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("case", ["masked softmax", "embedding_bag", "sparse.mm", "rows of a mask", "clamp"])
def test_gradients_go_through(case: str, handle: Any) -> None:
    torch.manual_seed(0)
    model, x = Calls(CASES[case] if case != "rows of a mask" else _differentiably_written), torch.randn(4, 4)
    (found,) = torch.autograd.grad(model(x).pow(2).sum(), model.layer.weight)
    handle.deactivate()
    (expected,) = torch.autograd.grad(model(x).pow(2).sum(), model.layer.weight)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.05)


def _differentiably_written(w: Tensor, x: Tensor) -> Tensor:
    w[MASK] = x[MASK]
    return w


def test_what_torch_refuses_in_fp32_too_is_refused_in_its_words(handle: Any) -> None:
    refused = {
        "a shape": (lambda w, x: x.masked_fill(torch.zeros(3, dtype=torch.bool), 1.0), "must match"),
        "a mask": (lambda w, x: x.masked_fill(torch.zeros(4), 1.0), "boolean mask"),
        "an fp64 value": (lambda w, x: w.__setitem__(MASK, x.double()[MASK]), "dtypes match"),
        "gradients": (lambda w, x: x.numpy(), "requires grad"),
    }
    for function, words in refused.values():
        with pytest.raises((RuntimeError, ValueError), match=words):
            Calls(function)(torch.randn(4, 4))


def test_what_is_the_programs_own_stays_as_it_is(half: torch.dtype) -> None:
    own = torch.full((2,), 3.0, dtype=torch.float16)
    assert own.numpy().dtype == np.float16
    shared = torch.zeros(3)
    shared.numpy()[0] = 5
    assert shared[0] == 5
    assert torch.zeros(2, dtype=half).masked_fill(torch.tensor([True, False]), float("-inf")).dtype is half
    kept = torch.zeros(2)
    kept[0] = BIG
    assert kept[0] == BIG
    assert torch.ones(2).masked_fill_(torch.tensor([True, False]), BIG)[0] == BIG
    with pytest.raises(IndexError):
        kept[5] = 1.0


def test_scripts_compile_as_in_torch() -> None:
    @torch.jit.script  # type: ignore[untyped-decorator]
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return torch.nn.functional.pad(torch.masked_fill(x, mask, -1e9), [1, 1], value=0.0)

    assert masked(torch.zeros(4, 4), MASK).shape == (4, 6)
