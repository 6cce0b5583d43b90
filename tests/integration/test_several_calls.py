"""Several calls of initialize(), one for each network: what each leaves alone, adds, and sets up anew."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autoamp
from autoamp.core import master_of, runtime_of

LISTS = {"extends": [], "fp16": ["linear"], "fp32": ["cross_entropy"]}
# A level of each kind before and after one of another kind, and two with masters.
PAIRS = [("O0", "O1"), ("O1", "O0"), ("O1", "O2"), ("O2", "O1"), ("O2", "O2"), ("O2", "O3"), ("O3", "O0")]


def initialize(models: Any, optimizers: Any = None, **kwargs: Any) -> Any:
    defaults = {"dtype": torch.float16, "device_type": "cpu", "lists": LISTS, "verbosity": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return autoamp.initialize(models, optimizers, **{**defaults, **kwargs})


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def sgd(*models: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for model in models for p in model.parameters()], 0.1, momentum=0.9)


def pair(seed: int) -> tuple[nn.Sequential, torch.optim.SGD]:
    model = network(seed)
    return model, sgd(model)


def two_pairs() -> tuple[nn.Sequential, torch.optim.SGD, nn.Sequential, torch.optim.SGD]:
    """A discriminator and a generator, say, each with its optimizer."""
    return *pair(1), *pair(2)


def step(model: nn.Module, optimizer: Any, seed: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs).float(), labels) * factor
    with autoamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def handle() -> autoamp.Handle:
    found = autoamp.current_handle()
    assert isinstance(found, autoamp.Handle)
    return found


def alone(seed: int, level: str) -> list[Tensor]:
    model, optimizer = pair(seed)
    initialize(model, optimizer, opt_level=level)
    for turn in range(3):
        step(model, optimizer, turn)
    found = values(model)
    handle().deactivate()
    return found


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_each_network_trains_as_if_it_were_alone(first: str, second: str) -> None:
    d, opt_d, g, opt_g = two_pairs()
    originals = [*d.parameters(), *g.parameters()]
    initialize(d, opt_d, opt_level=first)
    step(d, opt_d, 0)
    initialize(g, opt_g, opt_level=second)
    for turn in range(3):
        if turn:
            step(d, opt_d, turn)
        step(g, opt_g, turn)
    trained = values(d), values(g)
    handle().deactivate()
    # The way back is for both.
    assert {p.dtype for p in (*d.parameters(), *g.parameters())} == {torch.float32}
    assert [p for o in (opt_d, opt_g) for p in o.param_groups[0]["params"]] == originals
    assert same(values(d), trained[0])
    assert same(values(g), trained[1])
    for optimizer in (opt_d, opt_g):
        assert vars(optimizer).keys().isdisjoint({"step", "zero_grad", "add_param_group"})
    assert d(torch.ones(2, 6)).dtype is torch.float32
    assert same(trained[0], alone(1, first))
    assert same(trained[1], alone(2, second))


def test_the_handle_of_the_first_call_serves_all() -> None:
    d, opt_d, g, opt_g = two_pairs()
    initialize(d, opt_d, opt_level="O2")
    first = handle()
    initialize(g, opt_g, opt_level="O1", trace_overflow=True)
    assert handle() is first
    assert "O1" in repr(first)
    step(d, opt_d, 0, torch.inf)
    step(g, opt_g, 0)
    assert (first.skipped_steps, first.stats["steps"], len(first.overflows)) == (1, 2, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": torch.bfloat16}, r"dtype=torch\.bfloat16 differs from torch\.float16.*the same dtype to both calls"),
        ({"lists": {"extends": [], "fp16": ["matmul"]}}, "lists= differs.*pass the same lists to both calls"),
    ],
)
def test_what_two_calls_cannot_both_have_is_refused_and_the_first_goes_on(given: Any, message: str) -> None:
    d, opt_d, g, opt_g = two_pairs()
    initialize(d, opt_d, opt_level="O1")
    first = handle()
    with pytest.raises(autoamp.UsageError, match=message):
        initialize(g, opt_g, opt_level="O1", **given)
    assert handle() is first
    step(d, opt_d, 0)
    assert d(torch.ones(2, 6)).dtype is torch.float16
    # As the message says, after the first has ended.
    first.deactivate()
    initialize(g, opt_g, opt_level="O1", **given)


def test_enabled_false_ends_all_or_is_refused_while_another_network_is_in_use() -> None:
    d, opt_d, g, opt_g = two_pairs()
    initialize(d, opt_d, opt_level="O2")
    initialize(g, opt_g, opt_level="O1")
    with pytest.raises(autoamp.UsageError, match=r"end all earlier calls by autoamp\.current_handle\(\)\.deactivate"):
        initialize(g, opt_g, enabled=False)
    step(d, opt_d, 0)
    step(g, opt_g, 0)
    initialize([d, g], [opt_d, opt_g], enabled=False)
    assert autoamp.current_handle() is None
    assert {p.dtype for p in d.parameters()} == {torch.float32}
    assert opt_d.param_groups[0]["params"] == list(d.parameters())


def test_calls_of_one_kind_share_their_scalers() -> None:
    d, opt_d, g, opt_g = two_pairs()
    initialize(d, opt_d, opt_level="O2")
    step(d, opt_d, 0, torch.inf)
    initialize(g, opt_g, opt_level="O1", num_losses=2)
    state = autoamp.state_dict()
    assert {key: value["loss_scale"] for key, value in state.items() if key != "skipped_steps"} == {
        "loss_scaler0": 2.0**16, "loss_scaler1": 2.0**16,
    }  # fmt: skip
    step(d, opt_d, 1, torch.inf)
    assert autoamp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15
    assert state["skipped_steps"] == 0
    with autoamp.scale_loss(torch.ones((), requires_grad=True), [], loss_id=1) as scaled:
        assert scaled.item() == 2.0**16
    autoamp.load_state_dict(state)


def test_calls_of_different_kinds_have_scalers_of_their_own() -> None:
    d, opt_d, g, opt_g = two_pairs()
    initialize(d, opt_d, opt_level="O2")
    initialize(g, opt_g, opt_level="O0")
    assert handle().stats["loss_scales"] == [2.0**16, 1.0]
    for optimizers, scale in ((opt_d, 2.0**16), (opt_g, 1.0), ([opt_g, opt_d], 2.0**16), ([], 1.0)):
        with warnings.catch_warnings():
            # No parameter gets a gradient here.
            warnings.simplefilter("ignore")
            with autoamp.scale_loss(torch.ones((), requires_grad=True), optimizers) as scaled:
                assert scaled.item() == scale
    step(d, opt_d, 0, torch.inf)
    step(g, opt_g, 0)
    before = values(d)
    assert handle().skipped_steps == 1
    assert handle().stats["loss_scales"] == [2.0**15, 1.0]
    step(d, opt_d, 1)
    assert not same(values(d), before)


def test_a_state_is_loaded_though_a_model_from_before_lives_on() -> None:
    """As where a script saves, makes everything anew and loads, with other numbers."""
    earlier, optimizer = pair(1)
    initialize(earlier, optimizer, opt_level="O2", num_losses=2, loss_scale=64.0)
    state = autoamp.state_dict()
    later, optimizer = pair(2)
    initialize(later, optimizer, opt_level="O1", num_losses=2)
    state["loss_scaler1"]["loss_scale"] = 2.0**9
    autoamp.load_state_dict(state)
    assert handle().stats["loss_scales"] == [64.0, 64.0, 64.0, 2.0**9]
    autoamp.load_state_dict(autoamp.state_dict())
    with pytest.raises(autoamp.AutoampError, match="loss_scaler1"):
        autoamp.load_state_dict({"loss_scaler0": state["loss_scaler0"]})


def test_a_model_that_is_named_again_is_set_up_anew_and_the_other_one_left() -> None:
    d, opt_d, g, opt_g = two_pairs()
    initialize(d, opt_d, opt_level="O2")
    initialize(g, opt_g, opt_level="O2")
    step(d, opt_d, 0)
    step(g, opt_g, 0)
    master, kept = master_of(g[0].weight), values(d)
    again = sgd(d)
    initialize(d, again, opt_level="O1")
    assert {p.dtype for p in d.parameters()} == {torch.float32}
    assert same(values(d), kept)
    assert opt_d.param_groups[0]["params"] == list(d.parameters())
    assert "step" not in vars(opt_d)
    assert master_of(g[0].weight) is master
    assert g[0].weight.dtype is torch.float16
    step(g, opt_g, 1)
    assert torch.equal(g[0].weight, master.half())
    step(d, again, 1)
    assert d(torch.ones(2, 6)).dtype is torch.float16


def test_one_optimizer_over_both_networks() -> None:
    d, g = network(1), network(2)
    optimizer = sgd(d, g)
    initialize(d, optimizer, opt_level="O2")
    before = values(g)
    initialize(g, optimizer, opt_level="O2")
    assert same(values(g), before)
    assert {p.dtype for p in optimizer.param_groups[0]["params"]} == {torch.float32}
    assert len(runtime_of(handle()).optimizers.masters_of(optimizer)) == 8
    step(nn.Sequential(d, nn.Linear(3, 6), g), optimizer, 0)
    assert not same(values(g), before)
    assert torch.equal(g[0].weight, master_of(g[0].weight).half())
    handle().deactivate()
    assert optimizer.param_groups[0]["params"] == [*d.parameters(), *g.parameters()]


def test_a_part_of_an_earlier_model_is_that_model() -> None:
    whole, optimizer = pair(1)
    initialize(whole, optimizer, opt_level="O2")
    step(whole, optimizer, 0)
    kept = values(whole)
    initialize(whole[3], sgd(whole[3]), opt_level="O0")
    assert {p.dtype for p in whole.parameters()} == {torch.float32}
    assert same(values(whole), kept)
    assert len(runtime_of(handle()).setups) == 1


def test_overrides_of_earlier_models_stay() -> None:
    d, g = network(1), network(2)
    initialize(d, opt_level="O1")
    override = handle().override(d[3], "fp32")
    initialize(g, opt_level="O1")
    assert d(torch.ones(2, 6)).dtype is torch.float32
    assert g(torch.ones(2, 6)).dtype is torch.float16
    override.undo()
    assert d(torch.ones(2, 6)).dtype is torch.float16


# -- optimizers and groups that come later --


@pytest.mark.parametrize(("how", "kind"), [("built", torch.optim.Adam), ("added", torch.optim.Adagrad)])
def test_what_comes_after_initialize_is_loaded_unrounded(how: str, kind: Any) -> None:
    make = functools.partial(kind, lr=0.01)
    model = network(1)
    optimizer = make(model.parameters())
    initialize(model, optimizer, opt_level="O2")
    for turn in range(3):
        step(model, optimizer, turn)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    handle().deactivate()
    model = network(2)
    if how == "built":
        initialize(model, opt_level="O2")
        optimizer = make(model.parameters())
    else:
        optimizer = make(model[0].parameters())
        initialize(model, optimizer, opt_level="O2")
        optimizer.add_param_group({"params": [p for layer in model[1:] for p in layer.parameters()]})
        state = {**state, "param_groups": optimizer.state_dict()["param_groups"]}
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert same(values(model), list(weights.values()))
    for group in optimizer.param_groups:
        assert {param.dtype for param in group["params"]} == {torch.float32}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        for key, value in state["state"][index].items():
            assert torch.equal(optimizer.state[param][key], value)
            assert optimizer.state[param][key].dtype is value.dtype
    step(model, optimizer, 3)


def test_fp16_optimizer_takes_the_masters_that_are_there() -> None:
    model = network(1)
    initialize(model, opt_level="O2")
    inner = sgd(model)
    masters = list(inner.param_groups[0]["params"])
    optimizer = autoamp.FP16_Optimizer(inner, static_loss_scale=8.0)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], masters, strict=True))
    before = masters[0].detach().clone()
    optimizer.backward(model(torch.randn(4, 6)).square().mean())
    assert masters[0].grad is model[0].weight.grad
    optimizer.step()
    assert not torch.equal(masters[0], before)
    assert torch.equal(model[0].weight, masters[0].half())


def test_a_class_that_is_never_defined_is_warned_of_once_after_the_first_step() -> None:
    lists, counts = {**LISTS, "modules": {"__main__.NeverDefined": "fp32"}}, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed, (model, optimizer) in enumerate([pair(0), pair(1)]):
            autoamp.initialize(model, optimizer, dtype=torch.float16, device_type="cpu", lists=lists, verbosity=0)
            for _ in range(2):
                counts.append(len([one for one in caught if "a rule has no effect" in str(one.message)]))
                step(model, optimizer, seed)
    assert counts == [0, 1, 1, 1]
    assert any("'__main__.NeverDefined' under modules names no class" in str(one.message) for one in caught)
