"""The precision in which a CPU computes attention: what torch's kernel gets, by torch's dispatcher."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.core import CastState
from autoamp.core.special_calls import build_attention


class Attentions(TorchDispatchMode):
    """Notes the dtype of each call of an attention kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func.name():
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def pretend_units(units: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this an x86 CPU with these units, or without any."""
    has = {"architecture": "x86_64", **({units: True} if units else {})}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)


@pytest.mark.parametrize(
    ("half", "tokens", "keys", "trained", "units", "computed"),
    [
        ("bf16", 128, 128, True, None, "fp32"),
        ("bf16", 24, 24, False, None, "fp32"),
        ("bf16", 20, 160, True, None, "fp32"),
        ("bf16", 32, 400, True, None, "fp32"),
        ("bf16", 160, 4, True, None, "fp32"),
        # Few queries of many keys.
        ("bf16", 1, 600, False, None, "bf16"),
        ("bf16", 19, 160, True, None, "bf16"),
        ("bf16", 31, 400, False, None, "bf16"),
        ("bf16", 16, 16, True, None, "bf16"),
        ("bf16", 2, 160, False, None, "bf16"),
        ("bf16", 160, 2, True, None, "bf16"),
        ("bf16", 24, 24, True, "amx_bf16", "bf16"),
        ("fp16", 160, 160, True, None, "fp32"),
        ("fp16", 160, 160, False, None, "fp32"),
        ("fp16", 16, 16, True, "avx512_fp16", "fp16"),
    ],
)
def test_fp32_where_it_is_faster_and_a_half_result(
    half: str,
    tokens: int,
    keys: int,
    trained: bool,
    units: str | None,
    computed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_units(units, monkeypatch)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, count, 8, requires_grad=trained) for count in (tokens, keys, keys))
    mask = torch.ones(tokens, keys).tril().log()
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    autoamp.init(dtype=HALVES[half], device_type="cpu")
    with Attentions() as seen:
        result = F.scaled_dot_product_attention(query, key, value=value, attn_mask=mask)
        # Half products come in half, as do those of a layer.
        F.scaled_dot_product_attention(*(one.to(HALVES[half]) for one in (query, key, value)), is_causal=True)
    assert seen.dtypes == [HALVES.get(computed, torch.float32)] * 2
    assert result.dtype is HALVES[half]
    torch.testing.assert_close(result.float(), expected, atol=2e-2, rtol=2e-2)
    if trained:
        result.float().square().sum().backward()
        found = query.grad
        query.grad = None
        expected.square().sum().backward()
        torch.testing.assert_close(found, query.grad, atol=6e-2, rtol=6e-2)


@pytest.mark.parametrize("half", list(HALVES))
@pytest.mark.parametrize("tokens", [4, 24, 160])
@pytest.mark.parametrize("units", [None, "amx_bf16"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_model_computes_the_same_with_and_without_gradients(
    level: str, units: str | None, tokens: int, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_units(units, monkeypatch)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model: Any = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = autoamp.initialize(
        model, optimizer, opt_level=level, dtype=HALVES[half], device_type="cpu", verbosity=0
    )
    x = torch.randn(2, tokens, 16)
    expected = model(x).detach()
    for training in (True, False):
        model.train(training)
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(model(x), expected), (training, mode)


class SelfAttention(torch.nn.Module):
    """The query, key and value of a layer, of which every size but that of a head may be open."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*self.proj(x).chunk(3, -1))


@pytest.mark.parametrize("half", list(HALVES))
@pytest.mark.parametrize("open_sizes", [("batch",), ("tokens",), ("batch", "tokens")])
@pytest.mark.parametrize("strict", [False, True])
def test_a_model_is_exported_with_open_sizes(
    strict: bool, open_sizes: tuple[str, ...], half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_units(None, monkeypatch)
    torch.manual_seed(0)
    model = SelfAttention()
    autoamp.init(dtype=HALVES[half], device_type="cpu")
    dims = {place: torch.export.Dim(name) for place, name in enumerate(("batch", "tokens")) if name in open_sizes}
    x = torch.randn(3, 8, 16)
    # torch refuses a program whose choice of a dtype depends on an open size.
    program = torch.export.export(model, (x,), dynamic_shapes=(dims,), strict=strict)
    for shape in ((3, 8), (30, 8), (3, 80)):
        if all(size == size_now or dim in dims for dim, (size, size_now) in enumerate(zip(shape, (3, 8), strict=True))):
            x = torch.randn(*shape, 16)
            torch.testing.assert_close(program.module()(x), model(x), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("half", list(HALVES))
@pytest.mark.parametrize("tokens", [4, 32])
@pytest.mark.parametrize("level", [None, "O1", "O2", "O3"])
def test_a_model_is_traced(level: str | None, tokens: int, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_units(None, monkeypatch)
    torch.manual_seed(0)
    model: Any = SelfAttention()
    if level is None:
        autoamp.init(dtype=HALVES[half], device_type="cpu")
    else:
        autoamp.initialize(model, opt_level=level, dtype=HALVES[half], device_type="cpu", verbosity=0)
    x = torch.randn(3, tokens, 16)
    with torch.no_grad(), warnings.catch_warnings():
        # What depends on a size is fixed in the trace.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, (x,))
        torch.testing.assert_close(traced(x), model(x), atol=2e-2, rtol=2e-2)


def test_decoding_in_a_graph_with_an_open_number_of_keys_stays_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_units(None, monkeypatch)

    class Decoding(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, key)

    autoamp.init(dtype=torch.bfloat16, device_type="cpu")
    query, key = torch.randn(2, 2, 1, 64), torch.randn(2, 2, 600, 64)
    program = torch.export.export(Decoding(), (query, key), dynamic_shapes=({}, {2: torch.export.Dim("keys")}))
    with Attentions() as seen:
        program.module()(query, key)
    assert seen.dtypes == [torch.bfloat16]


def test_nested_tensors_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_units(None, monkeypatch)
    parts = [torch.randn(2, 5, 8), torch.randn(2, 3, 8)]
    nested: Any = torch.nested.nested_tensor([one.transpose(0, 1) for one in parts], layout=torch.jagged)
    nested = nested.bfloat16().transpose(1, 2)
    expected = F.scaled_dot_product_attention(nested, nested, nested)
    autoamp.init(dtype=torch.bfloat16, device_type="cpu")
    found = F.scaled_dot_product_attention(nested, nested, nested)
    assert torch.equal(found.values(), expected.values())


@pytest.mark.parametrize("tokens", [4, 32])
def test_compiled_code_chooses_as_eager_code_does(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_units(None, monkeypatch)
    torch.manual_seed(0)
    model = SelfAttention()
    autoamp.init(dtype=torch.bfloat16, device_type="cpu")
    x = torch.randn(3, tokens, 16)
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))


def test_arguments_that_are_not_cast_and_errors_are_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_units(None, monkeypatch)
    x = torch.randn(2, 2, 4, 8, requires_grad=True)
    autoamp.init(dtype=torch.float16, device_type="cpu")
    assert F.scaled_dot_product_attention(*[x.double()] * 3).dtype is torch.float64
    for given in ({}, {"query": x}, {"query": x, "key": x}, {"query": x, "value": x}, {"key": x, "value": x}):
        with pytest.raises(TypeError, match="missing"):
            F.scaled_dot_product_attention(**given)


@pytest.mark.parametrize(("device_type", "architecture"), [("cuda", "x86_64"), ("cpu", "aarch64")])
def test_other_processors_compute_it_in_half(
    device_type: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": architecture})
    assert build_attention(F.scaled_dot_product_attention, CastState(torch.float16, device_type)) is None


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("units", [None, "amx_bf16"])
def test_half_models_compute_it_in_fp32_too(level: str, units: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_units(units, monkeypatch)
    torch.manual_seed(0)
    model: Any = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 32, 16)
    expected = model(x, x, x, need_weights=False)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = autoamp.initialize(
        model, optimizer, opt_level=level, dtype=torch.bfloat16, device_type="cpu", verbosity=0
    )
    with Attentions() as seen:
        result = model(x, x, x, need_weights=False)[0]
    assert seen.dtypes == [torch.bfloat16 if units else torch.float32]
    # Of a part that stays in fp32.
    assert F.scaled_dot_product_attention(x, x, x).dtype is torch.float32
    torch.testing.assert_close(result.float(), expected, atol=2e-2, rtol=2e-2)
    result.float().sum().backward()
    assert all(param.grad.isfinite().all() for param in model.parameters())


WRONG: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "a number": lambda x: (x, 1, x),
    "a list": lambda x: (x, [1], x),
    "a number as query": lambda x: (1, x, x),
    "an array": lambda x: (x.numpy(), x, x),
    "a vector": lambda x: (x[0, 0, 0], x, x),
    "a vector as key": lambda x: (x, x[0, 0, 0], x),
    "other sizes": lambda x: (x, x[..., :3], x),
}


@pytest.mark.parametrize("level", [None, "O1", "O2", "O3"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_by_torch(name: str, level: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_units(None, monkeypatch)
    wrong = WRONG[name](torch.randn(2, 2, 4, 8))
    with pytest.raises(Exception) as expected:  # noqa: PT011
        F.scaled_dot_product_attention(*wrong)
    if level is None:
        autoamp.init(dtype=torch.bfloat16, device_type="cpu")
    else:
        autoamp.initialize(torch.nn.Linear(1, 1), opt_level=level, dtype=torch.bfloat16, device_type="cpu", verbosity=0)
    with pytest.raises(type(expected.value)):
        F.scaled_dot_product_attention(*wrong)


def test_a_graph_of_proxies_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_units(None, monkeypatch)
    autoamp.init(dtype=torch.bfloat16, device_type="cpu")
    graph = torch.fx.symbolic_trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    x = torch.randn(2, 2, 24, 8)
    torch.testing.assert_close(
        graph(x, x, x).float(), F.scaled_dot_product_attention(x, x, x).float(), atol=2e-2, rtol=2e-2
    )


MASKS = {"lower right": causal_lower_right, "upper left": causal_upper_left}


@pytest.mark.parametrize("level", [None, "modules", "O1", "O2", "O3"])
@pytest.mark.parametrize("half", list(HALVES))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("keys", [40, 24])
def test_a_causal_bias_masks(
    keys: int, mask: str, half: str, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_units(None, monkeypatch)
    torch.manual_seed(0)

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            bias = MASKS[mask](x.shape[-2], y.shape[-2])
            return F.scaled_dot_product_attention(self.proj(x), self.proj(y), self.proj(y), bias)

    model: Any = Masked()
    x, y = torch.randn(2, 2, 24, 8), torch.randn(2, 2, keys, 8)
    expected = model(x, y)
    if level in (None, "modules"):
        autoamp.init(dtype=HALVES[half], device_type="cpu", scope="modules" if level else "global")
    else:
        autoamp.initialize(model, opt_level=level, dtype=HALVES[half], device_type="cpu", verbosity=0)
    found = model(x, y)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=3e-2)
