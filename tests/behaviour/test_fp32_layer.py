"""docs/howto/fp32_layer.md: keep one layer in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autoamp

FP16, FP32 = torch.float16, torch.float32


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def start(modules: dict[str, str] | None = None, **settings: Any) -> autoamp.Handle:
    return autoamp.init(device_type="cpu", dtype=FP16, lists={"modules": modules or {}}, **settings)


def dtypes(model: nn.Module, called: nn.Module | None = None) -> list[torch.dtype]:
    """The dtypes that the two linear layers compute in."""
    found: list[torch.dtype] = []
    layers = [one for one in model.modules() if isinstance(one, nn.Linear)]
    hooks = [one.register_forward_hook(lambda module, args, out: found.append(out.dtype)) for one in layers]
    (called or model)(torch.rand(4, 8))
    for hook in hooks:
        hook.remove()
    return found


def test_override_keeps_one_layer_in_fp32_until_undo() -> None:
    handle, model = start(), Net()
    override = handle.override(model[2], "fp32")
    assert dtypes(model) == [FP16, FP32]
    override.undo()
    assert dtypes(model) == [FP16, FP16]


def test_a_class_in_a_list_keeps_all_its_instances_in_fp32() -> None:
    start({"torch.nn.Linear": "fp32"})
    assert dtypes(Net()) == [FP32, FP32]


@pytest.mark.parametrize("scope", ["global", "modules"])
def test_a_path_in_a_list_keeps_that_layer_in_fp32_from_the_first_call(scope: str) -> None:
    start({"2": "fp32"}, scope=scope)
    assert dtypes(Net()) == [FP16, FP32]


def test_paths_begin_within_data_parallelism_and_compilation(one_process: None) -> None:
    start({"2": "fp32"})
    models = Net(), Net()
    wrapped = DistributedDataParallel(models[0]), torch.compile(models[1], backend="eager")
    for model, called in zip(models, wrapped, strict=True):
        called(torch.rand(4, 8))
        assert dtypes(model) == [FP16, FP32]


def test_override_in_code_beats_a_path_in_a_list() -> None:
    handle, model = start({"2": "fp32"}), Net()
    handle.override(model[2], "fp16")
    assert dtypes(model) == [FP16, FP16]


def test_override_of_a_model_warns_of_a_path_that_matches_nothing_with_the_nearest() -> None:
    handle, model = start({"02": "fp32", "0": "fp32"}), Net()
    with pytest.warns(UserWarning, match="lists=: '02' matches no module of Net; did you mean '2'") as caught:
        handle.override(model)
    assert [one.filename for one in caught] == [__file__]
    assert dtypes(model) == [FP32, FP16]


def test_a_listed_function_runs_in_fp32() -> None:
    autoamp.init(device_type="cpu", dtype=FP16, lists={"fp32": ["einsum"]})
    assert torch.einsum("ij,jk", torch.rand(2, 2), torch.rand(2, 2)).dtype == FP32


def test_at_O2_a_listed_module_keeps_fp32_weights() -> None:
    model = Net()
    autoamp.initialize(model, opt_level="O2", device_type="cpu", dtype=FP16, lists={"modules": {"2": "fp32"}})
    assert (model[0].weight.dtype, model[2].weight.dtype) == (FP16, FP32)
    assert dtypes(model) == [FP16, FP32]


def test_at_O2_override_is_an_error_since_the_weights_are_cast_already() -> None:
    model = Net()
    autoamp.initialize(model, opt_level="O2", device_type="cpu", dtype=FP16)
    handle: Any = autoamp.current_handle()
    with pytest.raises(
        autoamp.UsageError, match=r"override\(Linear, 'fp32'\).*lists=\{\"modules\": \{\"path\": 'fp32'\}\}"
    ):
        handle.override(model[2], "fp32")
    handle.override(nn.Linear(2, 2), "fp32")
