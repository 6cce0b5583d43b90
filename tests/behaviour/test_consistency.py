"""docs/howto/consistency.md: training and inference that agree."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autoamp
from tests.behaviour.training import started


class Policy(nn.Module):
    """Its head is in fp32 where no gradients are recorded, if asked for."""

    def __init__(self, *, differs: bool) -> None:
        super().__init__()
        self.body, self.head, self.differs = nn.Linear(8, 8), nn.Linear(8, 2), differs

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).relu()
        if torch.is_grad_enabled() or not self.differs:
            return self.head(x)  # type: ignore[no-any-return]
        with autoamp.disable_casts():
            return self.head(x.float())  # type: ignore[no-any-return]


def test_a_model_that_computes_alike_on_all_paths_is_consistent() -> None:
    assert started().consistency(Policy(differs=False), torch.randn(4, 8), backend="eager").is_consistent


def test_the_first_call_that_differs_is_named_with_module_and_dtypes() -> None:
    found = started().consistency(Policy(differs=True), torch.randn(4, 8), backend=None)
    assert not found.is_consistent
    path = found.paths[0]
    assert path.name == "no_grad"
    assert path.dtype is not None
    assert (path.dtype.module, path.dtype.found, path.dtype.expected) == ("head", "float32", "float16")


def test_comparing_changes_neither_weights_nor_gradients_nor_random_numbers() -> None:
    handle, model = started(), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    handle.consistency(model, torch.ones(4, 8), backend=None)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
