"""Recurrent layers and their cells under the default lists."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import autoamp

LAYERS = [nn.RNN, nn.LSTM, nn.GRU]
CELLS = [nn.RNNCell, nn.LSTMCell, nn.GRUCell]
CLOSE = {"rtol": 3e-2, "atol": 3e-2}
FP32 = torch.float32


def start(half: torch.dtype, device: str = "cpu") -> autoamp.Handle:
    handle = autoamp.init(device_type=device, dtype=half, lists="default")
    assert isinstance(handle, autoamp.Handle)
    return handle


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, PackedSequence):
        return [value.data]
    return [value] if isinstance(value, Tensor) else [tensor for item in value for tensor in tensors(item)]


OF_ALL: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "dropout": 0.5},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True},
    {"bias": False},
]
VARIANTS: list[tuple[Any, dict[str, Any]]] = [
    *((layer, settings) for layer in LAYERS for settings in OF_ALL),
    (nn.LSTM, {"proj_size": 2}),
    (nn.LSTM, {"proj_size": 2, "bidirectional": True, "num_layers": 2}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


@pytest.mark.parametrize(("layer", "settings"), VARIANTS, ids=str)
def test_layers(half: torch.dtype, device: str, layer: Any, settings: dict[str, Any]) -> None:
    model = layer(4, 5, **settings).to(device)
    if settings.get("dropout"):
        model.eval()
    x = torch.randn(6, 3, 4, device=device)
    reference_model = copy.deepcopy(model)
    reference = reference_model(x)
    reference[0].sum().backward()

    start(half, device)
    output = model(x)
    output[0].float().sum().backward()

    assert {tensor.dtype for tensor in tensors(output)} == {half}
    for found, wanted in zip(tensors(output), tensors(reference), strict=True):
        assert found.shape == wanted.shape
        torch.testing.assert_close(found.float(), wanted, **CLOSE)
    for parameter, wanted in zip(model.parameters(), reference_model.parameters(), strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == FP32
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=0.1, atol=0.2)


@pytest.mark.parametrize("layer", LAYERS)
def test_input_weights_and_state_in_any_mixture(half: torch.dtype, layer: Any) -> None:
    start(half)
    for weights, source, state_dtype in itertools.product((FP32, half), repeat=3):
        model, x = layer(4, 5).to(weights), torch.randn(6, 3, 4, dtype=source)
        state: Any = torch.zeros(1, 3, 5, dtype=state_dtype)
        state = (state, state.clone()) if layer is nn.LSTM else state
        for output in (model(x), model(x, state), model(input=x, hx=state)):
            assert {tensor.dtype for tensor in tensors(output)} == {half}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("source", ["fp32", "half"])
def test_packed_sequences(half: torch.dtype, layer: Any, enforce_sorted: bool, source: str) -> None:
    lengths = [5, 3, 1] if enforce_sorted else [3, 5, 1]
    x = torch.randn(5, 3, 4)
    model = layer(4, 6, bidirectional=True)
    reference = pad_packed_sequence(model(pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted))[0])[0]

    start(half)
    x = x.to(half) if source == "half" else x
    output, state = model(pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted))
    assert isinstance(output, PackedSequence)
    assert {tensor.dtype for tensor in (output.data, *tensors(state))} == {half}
    padded, found = pad_packed_sequence(output)
    assert found.tolist() == lengths
    torch.testing.assert_close(padded.float(), reference, **CLOSE)
    padded.float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("cell", CELLS)
def test_cells(half: torch.dtype, device: str, cell: Any) -> None:
    model = cell(4, 5).to(device)
    x = torch.randn(3, 4, device=device)
    zeros = torch.zeros(3, 5, device=device)
    state: Any = (zeros, zeros) if cell is nn.LSTMCell else zeros
    reference = model(x, state)

    start(half, device)
    for output in (model(x), model(x, state), model(x.to(half), state)):
        assert {tensor.dtype for tensor in tensors(output)} == {half}
        for found, wanted in zip(tensors(output), tensors(reference), strict=True):
            torch.testing.assert_close(found.float(), wanted, **CLOSE)
    tensors(output)[0].float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == FP32 for parameter in model.parameters())
    assert {tensor.dtype for tensor in tensors(model.to(half)(x))} == {half}


# -- the check of the input --


@pytest.mark.parametrize("layer", LAYERS)
def test_checks_of_the_input_still_hold(half: torch.dtype, layer: Any) -> None:
    handle = start(half)
    model = layer(4, 5)
    for dtype in (FP32, half):
        with pytest.raises(RuntimeError, match="Expected 4, got 3"):
            model(torch.randn(6, 3, 3, dtype=dtype))
    with pytest.raises(ValueError, match="2D or 3D"):
        model(torch.randn(6, 3, 3, 4).to(half))
    doubles, halves = torch.randn(6, 3, 4, dtype=torch.float64), torch.randn(6, 3, 4, dtype=half)
    with pytest.raises(ValueError, match=r"RNN input dtype \(torch.float64\) does not match"):
        model(doubles)
    assert layer(4, 5).double()(doubles)[0].dtype == torch.float64
    with handle.disable_casts(), pytest.raises(ValueError, match="does not match"):
        model(halves)
    handle.deactivate()
    with pytest.raises(ValueError, match="does not match"):
        model(halves)


# -- TorchScript, while active --


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("model", [*(Wrapped(layer(4, 5)) for layer in LAYERS), *(cell(4, 5) for cell in CELLS)])
def test_script_while_active(model: nn.Module) -> None:
    start(torch.float16)
    x = torch.randn(3, 4)
    scripted = torch.jit.script(model)
    # What is compiled calls the ops themselves: no patch of a Python name reaches it.
    autoamp.current_handle().deactivate()  # type: ignore[union-attr]
    for found, wanted in zip(tensors(scripted(x)), tensors(model(x)), strict=True):
        assert torch.equal(found, wanted)
