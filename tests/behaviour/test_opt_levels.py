"""docs/opt_levels.md: the opt levels O0 to O3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from tests.behaviour.training import step

FP16, FP32 = torch.float16, torch.float32


def initialized(level: Any, **settings: Any) -> tuple[nn.Sequential, torch.optim.SGD]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return autoamp.initialize(model, optimizer, opt_level=level, device_type="cpu", dtype=FP16, **settings)


@pytest.mark.filterwarnings("ignore:BatchNorm1d '1' keeps its running statistics")
@pytest.mark.parametrize(
    ("level", "weight", "norm"),
    [("O0", FP32, FP32), ("O1", FP32, FP32), ("O2", FP16, FP32), ("O3", FP16, FP16)],
)
def test_a_level_says_in_which_dtype_weights_and_norms_are(level: str, weight: torch.dtype, norm: torch.dtype) -> None:
    settings = {"keep_batchnorm_fp32": False} if level == "O3" else {}
    model, _ = initialized(level, **settings)
    assert (model[0].weight.dtype, model[1].weight.dtype) == (weight, norm)


def test_at_O2_the_optimizer_steps_fp32_masters_which_are_rounded_into_weights_and_saved_as_they_are() -> None:
    model, optimizer = initialized("O2", loss_scale=128.0)
    step(model, optimizer)
    master, state = next(iter(autoamp.master_params(optimizer))), model.state_dict()
    assert master.dtype == state["0.weight"].dtype == FP32
    assert torch.equal(master.to(FP16), model[0].weight)
    assert torch.equal(master, state["0.weight"])
    nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).load_state_dict(state)


@pytest.mark.parametrize("wrong", ["02", "o2", 2, "O4"], ids=repr)
def test_a_level_that_is_none_is_refused_with_the_levels_and_the_letter_O(wrong: Any) -> None:
    with pytest.raises(autoamp.UsageError, match=r"'O2' or 'O3', which begin with the letter O, not the digit 0"):
        initialized(wrong)
    assert autoamp.current_handle() is None


# -- what O1 runs, runs: the list set `o2` inside half models --


class Runs(nn.Module):
    """A model that computes a function of one layer and its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function, self.seen = nn.Linear(4, 4), function, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.function(self.layer, x)
        self.seen.append(result.dtype)
        return result  # type: ignore[no-any-return]


def seen(function: Any, level: str = "O2", dtype: torch.dtype = FP16, **settings: Any) -> torch.dtype:
    """Return the dtype of what a function of a layer and its input returns within the model."""
    model = Runs(function)
    autoamp.initialize(model, opt_level=level, device_type="cpu", dtype=dtype, verbosity=0, **settings)
    assert model(torch.rand(4, 4)).dtype is FP32
    return model.seen[0]  # type: ignore[no-any-return]


HALVES = pytest.mark.parametrize("half", [FP16, torch.bfloat16])
LEVELS = pytest.mark.parametrize("level", ["O2", "O3"])


@HALVES
@LEVELS
def test_a_call_that_mixes_half_and_fp32_is_made_in_half_and_one_in_fp32_is_left(level: str, half: torch.dtype) -> None:
    assert seen(lambda layer, x: layer(x + torch.ones(4)), level, half) is half
    assert seen(lambda layer, x: x @ torch.ones(4, 4), level, half) is half
    assert seen(lambda layer, x: x.float() @ torch.ones(4, 4), level, half) is FP32
    assert seen(lambda layer, x: torch.zeros(4, 4).index_add(0, torch.arange(4), x), level, half) is half


def test_what_writes_keeps_its_dtype() -> None:
    def write(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(4, 4)
        out[torch.tensor([0, 2])] = x[:2]
        torch.mm(x, torch.ones(4, 4), out=torch.empty_like(x))
        return out.index_add_(0, torch.arange(4), layer(x)).scatter_(0, torch.zeros(1, 4, dtype=torch.long), x)

    assert seen(write) is FP32


@HALVES
def test_an_op_without_a_half_kernel_is_made_in_fp32(half: torch.dtype) -> None:
    assert seen(lambda layer, x: torch.linalg.slogdet(layer.weight)[1] + x.float(), dtype=half) is FP32
    assert seen(lambda layer, x: torch.fft.rfft(layer(x)).real, dtype=half) is FP32
    assert seen(lambda layer, x: torch.quantile(layer(x), 0.5), dtype=half) is FP32
    assert seen(lambda layer, x: torch.erfinv(x) + x.clone().erfinv_(), dtype=half) is half


@LEVELS
def test_the_entries_of_a_projects_list_act_as_at_O1(level: str, tmp_path: Any, monkeypatch: Any) -> None:
    def product(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,ij->bj", x, layer.weight)

    entry: dict[str, Any] = {"fp32": ["einsum"]}
    assert seen(product, level) is FP16
    assert seen(product, level, lists=entry) is seen(product, "O1", lists=entry) is FP32
    (tmp_path / "autoamp.toml").write_text('schema = 1\nfp32 = ["einsum"]\nnone = ["linear"]\n')
    monkeypatch.chdir(tmp_path)
    assert seen(product, level) is FP32
    assert seen(product, level, lists={"none": ["einsum"]}) is FP16
    with pytest.raises(RuntimeError, match="same dtype"):
        seen(lambda layer, x: layer(x + torch.ones(4)), level)


def test_a_list_with_no_base_has_its_own_entries_alone_at_O2() -> None:
    with pytest.raises(RuntimeError, match="same dtype"):
        seen(lambda layer, x: layer(x + torch.ones(4)), lists={"extends": []})
    assert seen(lambda layer, x: torch.sum(x, 1), lists={"extends": [], "fp32": ["sum"]}) is FP32
    # The rules of another base are for fp32 models.
    assert seen(lambda layer, x: layer(x).softmax(-1), lists="apex") is FP16


def test_an_unknown_op_in_a_list_is_refused_at_O2_too() -> None:
    with pytest.raises(autoamp.ListFileError, match="softmx"):
        seen(lambda layer, x: x, lists={"fp32": ["softmx"]})


def test_outside_of_half_models_and_in_disable_casts_torch_is_torchs_own() -> None:
    model = Runs(lambda layer, x: layer(x + torch.ones(4)))
    autoamp.initialize(model, opt_level="O2", device_type="cpu", dtype=FP16, lists={"fp32": ["exp"]})
    assert torch.ones(2, dtype=FP16).exp().dtype is FP16
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.ones(2, 2) @ torch.ones(2, 2, dtype=FP16)
    handle = autoamp.current_handle()
    assert isinstance(handle, autoamp.Handle)
    with handle.disable_casts(), pytest.raises(RuntimeError, match="same dtype"):
        model(torch.rand(4, 4))


def test_a_model_of_O1_and_one_of_O2_each_go_by_their_own_rules() -> None:
    wide, half = (
        Runs(lambda layer, x: layer(x).softmax(-1)),
        Runs(lambda layer, x: layer(x + torch.ones(4)).softmax(-1)),
    )
    for level, model in (("O1", wide), ("O2", half)):
        autoamp.initialize(model, opt_level=level, device_type="cpu", dtype=FP16, verbosity=0)
    wide(torch.rand(4, 4)), half(torch.rand(4, 4))
    assert (wide.seen, half.seen) == ([FP32], [FP16])


def test_the_members_of_a_module_list_are_models() -> None:
    members = nn.ModuleList([nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])])
    autoamp.initialize(members, opt_level="O2", device_type="cpu", dtype=FP16, lists={"modules": {"0": "fp32"}})
    for member in (members[0], members[1][0]):
        assert member(torch.rand(2, 4)).dtype is FP32


def test_a_model_is_exported_after_a_step() -> None:
    model, optimizer = initialized("O2", loss_scale=128.0)
    step(model, optimizer)
    before = [param.grad for param in model.parameters()]
    x = torch.rand(4, 4)
    exported = torch.export.export(model.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), model(x), atol=2e-3, rtol=2e-3)
    assert all(param.grad is grad for param, grad in zip(model.parameters(), before, strict=True))


def test_init_says_that_it_makes_a_half_model_fp32_again() -> None:
    model, _ = initialized("O2")
    with pytest.warns(UserWarning, match="Sequential is fp32 again"):
        autoamp.init(device_type="cpu", dtype=FP16)
    assert model[0].weight.dtype is FP32


def test_an_fp32_part_of_a_half_model_computes_in_fp32() -> None:
    part = Runs(lambda layer, x: layer(x) + torch.linalg.slogdet(layer.weight)[1])
    model = nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 4))
    lists = {"modules": {"1": "fp32"}, "fp16": ["linear"]}
    autoamp.initialize(model, opt_level="O2", device_type="cpu", dtype=FP16, lists=lists)
    model(torch.rand(4, 4))
    assert part.seen == [FP32]


@HALVES
def test_samples_of_half_logits_come_from_their_probabilities(half: torch.dtype) -> None:
    logits, found = torch.linspace(-2, 2, 4096).to(half), []

    def sample(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        distribution = torch.distributions.Categorical(logits=logits)
        found.append((distribution.probs, torch.multinomial(logits.softmax(-1), 3), distribution.sample((100_000,))))
        return x

    seen(sample, dtype=half)
    (probabilities, _, samples), expected = found[0], logits.float().softmax(-1)
    torch.testing.assert_close(probabilities, expected, rtol=1e-4, atol=0)
    frequencies = torch.bincount(samples, minlength=4096) / len(samples)
    parts = frequencies.view(8, -1).sum(1), expected.view(8, -1).sum(1)
    torch.testing.assert_close(*parts, rtol=0.04, atol=0)
