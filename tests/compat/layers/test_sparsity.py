"""Masks of two in four against a search over all, and ASP's life: prepared, masked, trained, restored."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoamp.compat.layers.sparsity import ASP, create_mask
from autoamp.errors import UsageError
from autoamp.fp16_utils import FP16_Optimizer


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    ASP.reset()


def kept_by_search(row: list[float]) -> float:
    """The most that two of each four values can hold."""
    groups = [row[start : start + 4] for start in range(0, len(row), 4)]
    return sum(max(sum(pair) for pair in itertools.combinations([*group, 0.0, 0.0], 2)) for group in groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(8,), (6,), (3, 16), (5, 7), (4, 8, 3), (4, 8, 3, 2), (2, 4, 3, 2, 2)])
def test_masks_keep_the_largest(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    before = weight.clone()
    mask = create_mask(weight)
    assert mask.dtype is dtype
    assert mask.shape == weight.shape
    assert torch.equal(weight, before)
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    # The inputs of a convolution are its second dimension.
    columns = weight.shape[min(1, weight.dim() - 1)]
    rows, masks = (
        (tensor if tensor.dim() == 1 else tensor.movedim(1, -1)).reshape(-1, columns) for tensor in (weight, mask)
    )
    for row, kept in zip(rows.abs().double(), masks.double(), strict=True):
        assert float((row * kept).sum()) == pytest.approx(kept_by_search(row.tolist()))
        assert all(int(group.sum()) <= 2 for group in kept.split(4))


@pytest.mark.parametrize(("pattern", "density"), [("m4n2_2d_best", 0.5), ("m4n2_1d", 0.25)])
def test_unknown_patterns(pattern: str, density: float) -> None:
    with pytest.raises(UsageError, match=r"pattern='m4n2_2d_best'|density=0\.25"):
        create_mask(torch.ones(4, 4), pattern, density)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))


def given() -> Tensor:
    return torch.randn(6, 16, 4, 4, generator=torch.Generator().manual_seed(1))


def train(model: Any, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(given()).square().mean().backward()
        optimizer.step()


def test_a_trained_model_keeps_its_zeros() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1)
    train(model, optimizer)
    dense = copy.deepcopy(model.state_dict())
    ASP.prune_trained_model(model, optimizer)
    masks = [create_mask(dense[f"{name}.weight"]).bool() for name in (0, 2)]
    for index, mask in zip((0, 2), masks, strict=True):
        assert torch.equal(model[index].weight, dense[f"{index}.weight"] * mask)
        assert torch.equal(model[index].get_buffer("__weight_mma_mask"), mask)
    # 3 outputs are no multiple of 8.
    assert torch.equal(model[4].weight, dense["4.weight"])
    assert ASP.is_sparsity_enabled()
    train(model, optimizer)
    for index, mask in zip((0, 2), masks, strict=True):
        assert not model[index].weight[~mask].any()
        assert model[index].weight[mask].all()
        assert not torch.equal(model[index].weight, dense[f"{index}.weight"] * mask)
        assert not model[index].weight.grad[~mask].any()
    pickle.loads(pickle.dumps(model.state_dict()))
    ASP.reset()
    train(model, optimizer, 1)
    assert model[0].weight[~masks[0]].any(), "the optimizer steps as before"


def test_masks_are_computed_again_and_taken_back() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not ASP.already_init_asp_model()
    ASP.init_model_for_pruning(model, "m4n2_1d", verbosity=0, allow_recompute_mask=True)
    ASP.init_optimizer_for_pruning(optimizer)
    assert ASP.already_init_asp_model()
    assert not ASP.is_sparsity_enabled()
    dense = model[2].weight.detach().clone()
    ASP.compute_sparse_masks()
    ASP.compute_sparse_masks()
    assert torch.equal(model[2].weight, dense * create_mask(dense))
    ASP.restore_pruned_weights()
    assert torch.equal(model[2].weight, dense)
    assert not ASP.is_sparsity_enabled()


def test_layers_and_masks_of_ones_own() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(8, 16))

    model = nn.ModuleDict({"own": Own(), "a": nn.Linear(16, 8), "b": nn.Linear(16, 8)})
    half = torch.arange(16) % 4 < 2
    ASP.init_model_for_pruning(
        model, lambda weight: half.expand_as(weight), custom_layer_dict={Own: ["factor"]}, disallowed_layer_names=["b"]
    )
    ASP.compute_sparse_masks()
    assert torch.equal(model["own"].factor, half.expand(8, 16).float())
    assert not model["a"].weight[:, ~half].any()
    assert model["b"].weight.all()
    with pytest.raises(UsageError, match="allow_recompute_mask=True"):
        ASP.compute_sparse_masks()


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adam])
def test_masters_are_masked_too(inner: Any, half: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 8)).to(half)
    optimizer = FP16_Optimizer(inner(model.parameters(), lr=0.05), static_loss_scale=8.0, verbose=False)
    ASP.prune_trained_model(model, optimizer)
    mask = model[0].get_buffer("__weight_mma_mask")
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(4, 16).to(half)).float().square().mean())
        optimizer.step()
        assert not model[0].weight[~mask].any()
        (master,) = [p for group in optimizer.param_groups for p in group["params"] if p.dim() == 2]
        assert master.dtype is torch.float32
        assert not master[~mask].any()
        assert master[mask].all()


def test_wrong_order() -> None:
    with pytest.raises(UsageError, match="no model"):
        ASP.compute_sparse_masks()
    with pytest.raises(UsageError, match="no model"):
        ASP.init_optimizer_for_pruning(torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(UsageError, match="pattern='nope'"):
        ASP.init_model_for_pruning(net(), "nope")
    with pytest.raises(UsageError, match="ReLU"):
        ASP.init_model_for_pruning(net(), whitelist=[nn.ReLU])
    ASP.init_model_for_pruning(net())
    with pytest.raises(UsageError, match=r"ASP\.reset"):
        ASP.init_model_for_pruning(net())
    with pytest.raises(UsageError, match=r"Expected a torch\.optim\.Optimizer"):
        ASP.init_optimizer_for_pruning(object())  # type: ignore[arg-type]
    ASP.init_optimizer_for_pruning(torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"ASP\.reset"):
        ASP.init_optimizer_for_pruning(torch.optim.SGD(net().parameters(), lr=0.1))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_by_the_names_of_apex(apex: Any, level: str) -> None:
    from apex.contrib.sparsity import ASP as theirs  # noqa: N811
    from apex.contrib.sparsity.sparse_masklib import create_mask as by_its_module

    assert theirs is ASP
    assert by_its_module is create_mask
    model: Any = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    ASP.prune_trained_model(model, optimizer)
    mask = model[2].get_buffer("__weight_mma_mask")
    for _ in range(3):
        optimizer.zero_grad()
        with apex.amp.scale_loss(model(given()).float().square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
    assert optimizer.state
    assert not model[2].weight[~mask].any()
    assert not any(master[~mask].any() for master in apex.amp.master_params(optimizer) if master.shape == mask.shape)
