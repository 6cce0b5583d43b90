"""Recurrent layers and their cells under the default lists."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import autoamp
from autoamp.casting.casts import Casts
from autoamp.ops.recurrent import build_check_input

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


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "two bidirectional layers": {"num_layers": 2, "bidirectional": True},
    "batch_first": {"batch_first": True},
    "no bias": {"bias": False},
    "dropout": {"num_layers": 2, "dropout": 0.5},
    "projection": {"proj_size": 2},
    "bidirectional projection": {"proj_size": 2, "bidirectional": True, "num_layers": 2},
    "relu": {"nonlinearity": "relu"},
}


def variants() -> list[Any]:
    found = []
    for layer in LAYERS:
        for name, settings in VARIANTS.items():
            if "proj_size" in settings and layer is not nn.LSTM:
                continue
            if "nonlinearity" in settings and layer is not nn.RNN:
                continue
            found.append(pytest.param(layer, settings, id=f"{layer.__name__} {name}"))
    return found


@pytest.mark.parametrize(("layer", "settings"), variants())
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
    for weights in (FP32, half):
        for source in (FP32, half):
            for state_dtype in (FP32, half):
                model = layer(4, 5).to(weights)
                x = torch.randn(6, 3, 4, dtype=source)
                state: Any = torch.zeros(1, 3, 5, dtype=state_dtype)
                if layer is nn.LSTM:
                    state = (state, state.clone())
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


@pytest.mark.parametrize("layer", LAYERS)
def test_unbatched_and_training_with_dropout(half: torch.dtype, layer: Any) -> None:
    start(half)
    model = layer(4, 5, num_layers=2, dropout=0.5)
    output, _ = model(torch.randn(6, 4))
    assert output.shape == (6, 5)
    assert output.dtype == half
    output.float().sum().backward()
    assert model.weight_hh_l1.grad.dtype == FP32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layer", LAYERS)
def test_evaluation(half: torch.dtype, layer: Any, mode: Any) -> None:
    model = layer(4, 5).eval()
    x = torch.randn(6, 3, 4)
    with torch.no_grad():
        reference = model(x)[0]
    handle = start(half)
    with mode():
        torch.testing.assert_close(model(x)[0].float(), reference, **CLOSE)
        with handle.inference(model):
            torch.testing.assert_close(model(x.to(half))[0].float(), reference, **CLOSE)


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


@pytest.mark.parametrize("layer", LAYERS)
def test_training_lowers_the_loss(layer: Any) -> None:
    handle = start(torch.float16)
    model = nn.ModuleDict({"rnn": layer(4, 8), "head": nn.Linear(8, 1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x = torch.randn(5, 16, 4)
    target = x.sum((0, 2))[:, None]
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model["head"](model["rnn"](x)[0][-1]), target)
        losses.append(loss.item())
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


# -- the check of the input --


@pytest.mark.parametrize("layer", LAYERS)
def test_other_checks_of_the_input_still_hold(half: torch.dtype, layer: Any) -> None:
    start(half)
    model = layer(4, 5)
    for dtype in (FP32, half):
        with pytest.raises(RuntimeError, match="Expected 4, got 3"):
            model(torch.randn(6, 3, 3, dtype=dtype))
    with pytest.raises(ValueError, match="2D or 3D"):
        model(torch.randn(6, 3, 3, 4).to(half))


@pytest.mark.parametrize("layer", LAYERS)
def test_dtypes_that_are_not_cast_are_still_refused(half: torch.dtype, layer: Any) -> None:
    handle = start(half)
    model = layer(4, 5)
    with pytest.raises(ValueError, match=r"RNN input dtype \(torch.float64\) does not match"):
        model(torch.randn(6, 3, 4, dtype=torch.float64))
    with handle.disable_casts(), pytest.raises(ValueError, match="does not match"):
        model(torch.randn(6, 3, 4, dtype=half))
    handle.deactivate()
    with pytest.raises(ValueError, match="does not match"):
        model(torch.randn(6, 3, 4, dtype=half))


def test_doubles_are_computed_as_ever(half: torch.dtype) -> None:
    start(half)
    assert nn.LSTM(4, 5).double()(torch.randn(6, 3, 4, dtype=torch.float64))[0].dtype == torch.float64


def test_check_input_allocates_nothing() -> None:
    casts = Casts(torch.float16, "cpu")
    casts.open()
    seen: list[Tensor] = []

    def original(self: Any, input: Tensor, batch_sizes: Tensor | None) -> None:
        seen.append(input)

    model, x = nn.LSTM(4, 5), torch.randn(6, 3, 4)
    check = build_check_input(original, casts)
    check(model, x, None)
    check(model, x.half(), None)
    assert seen[0] is x
    assert seen[1].device.type == "meta"
    assert seen[1].dtype == FP32
    assert seen[1].shape == x.shape


# -- TorchScript, while active --


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("layer", LAYERS)
def test_script_of_layers_while_active(layer: Any) -> None:
    start(torch.float16)
    model = Wrapped(layer(4, 5))
    x = torch.randn(6, 3, 4)
    scripted = torch.jit.script(model)
    # What is compiled calls the ops themselves: no patch of a Python name reaches it.
    autoamp.current_handle().deactivate()  # type: ignore[union-attr]
    assert torch.equal(scripted(x), model(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("cell", CELLS)
def test_script_of_cells_while_active(cell: Any) -> None:
    start(torch.float16)
    model, x = cell(4, 5), torch.randn(3, 4)
    scripted = torch.jit.script(model)
    autoamp.current_handle().deactivate()  # type: ignore[union-attr]
    for found, wanted in zip(tensors(scripted(x)), tensors(model(x)), strict=True):
        assert torch.equal(found, wanted)
