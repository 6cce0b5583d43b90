"""Attention against loops over samples, heads and queries in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from autoamp.compat.layers.attention import EncdecMultiheadAttn, SelfMultiheadAttn, fast_mask_softmax_dropout_func
from autoamp.errors import UsageError

HEADS, WIDTH, TIME, SOURCE, BATCH = 2, 6, 4, 5, 3
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def by_loops(queries: Tensor, keys: Tensor, values: Tensor, added: Tensor) -> Tensor:
    """Attend with tensors of shape ``(time, batch, heads, width)`` and ``added``, ``(batch, time, source)``."""
    rows = []
    for time in range(queries.shape[0]):
        for b in range(queries.shape[1]):
            for head in range(queries.shape[2]):
                scores = keys[:, b, head] @ queries[time, b, head] / math.sqrt(queries.shape[3]) + added[b, time]
                rows.append((torch.softmax(scores, 0)[:, None] * values[:, b, head]).sum(0))
    return torch.stack(rows).view(*queries.shape[:2], -1)


def reference(layer: Any, query: Tensor, key: Tensor | None, added: Tensor) -> Tensor:
    given = query
    if layer.include_norm_add:
        weight, bias = (
            (layer.lyr_nrm_gamma_weights, layer.lyr_nrm_beta_weights)
            if layer.impl == "fast" else (layer.lyr_nrm.weight, layer.lyr_nrm.bias)
        )  # fmt: skip
        centred = query - query.mean(-1, keepdim=True)
        given = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    def projected(value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return value @ weight.t() + (0 if bias is None else bias)

    def heads(value: Tensor, parts: int) -> list[Tensor]:
        """Rows of the weight go by head, then by part, then by feature."""
        width = layer.head_dim
        found = [[value[..., (head * parts + part) * width :][..., :width] for head in range(HEADS)]
                 for part in range(parts)]  # fmt: skip
        return [torch.stack(each, dim=2) for each in found]

    if key is not None:
        (queries,) = heads(projected(given, layer.in_proj_weight_q, layer.in_proj_bias_q), 1)
        keys, values = heads(projected(key, layer.in_proj_weight_kv, layer.in_proj_bias_kv), 2)
    elif layer.separate_qkv_params:
        weights = [(layer.q_weight, layer.q_bias), (layer.k_weight, layer.k_bias), (layer.v_weight, layer.v_bias)]
        queries, keys, values = (heads(projected(given, *pair), 1)[0] for pair in weights)
    else:
        queries, keys, values = heads(projected(given, layer.in_proj_weight, layer.in_proj_bias), 3)
    out = projected(by_loops(queries, keys, values, added), layer.out_proj_weight, layer.out_proj_bias)
    return out + query if layer.include_norm_add else out


def masks(kind: str, source: int) -> tuple[dict[str, Tensor], Tensor]:
    """The arguments for a mask, and what it adds to the scores of each sample."""
    added = torch.zeros(BATCH, TIME, source, dtype=torch.float64)
    if kind == "padding":
        mask = torch.zeros(BATCH, source, dtype=torch.uint8)
        mask[0, -1:], mask[1, -2:] = 1, 1
        return {"key_padding_mask": mask}, added.masked_fill(mask.bool()[:, None], -math.inf)
    if kind == "added":
        mask = torch.randn(BATCH, source)
        return {"key_padding_mask": mask}, added + mask[:, None]
    if kind == "future":
        mask = torch.triu(torch.ones(TIME, source, dtype=torch.uint8), 1)
        return {"attn_mask": mask}, added.masked_fill(mask.bool(), -math.inf)
    return {}, added


def compare(layer: Any, kind: str, dtype: torch.dtype, *, encoder: bool) -> None:
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn_like(param) * 0.5)
    layer = layer.to(dtype)
    exact = type(layer)(*layer.made_by[0], **layer.made_by[1]).double()
    exact.load_state_dict(layer.state_dict())
    query = torch.randn(TIME, BATCH, WIDTH).to(dtype).requires_grad_()
    key = torch.randn(SOURCE, BATCH, WIDTH).to(dtype).requires_grad_() if encoder else None
    extra, added = masks(kind, SOURCE if encoder else TIME)
    found, weights = layer(query, query if key is None else key, query if key is None else key, **extra)
    assert weights is None
    assert found.dtype is dtype
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (query, key)]
    expected = reference(exact, *wide, added)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    found.double().sin().sum().backward()
    expected.sin().sum().backward()
    pairs = [(query, wide[0]), *zip(layer.parameters(), exact.parameters(), strict=True)]
    for one, other in [*pairs, *([(key, wide[1])] if encoder else [])]:
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])


def made(kind: Any, *args: Any, **options: Any) -> Any:
    layer = kind(*args, **options)
    layer.made_by = args, options
    return layer


@pytest.mark.parametrize("mask", ["none", "padding", "future", "added"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    ("bias", "norm", "impl"), [(False, False, "fast"), (True, True, "fast"), (True, True, "default")]
)
def test_self(bias: bool, norm: bool, impl: str, separate: bool, dtype: torch.dtype, mask: str) -> None:
    torch.manual_seed(0)
    layer = made(
        SelfMultiheadAttn, WIDTH, HEADS, 0.0, bias, norm, impl,
        separate_qkv_params=separate, mask_additive=mask == "added",
    )  # fmt: skip
    compare(layer, mask, dtype, encoder=False)


@pytest.mark.parametrize("mask", ["none", "padding", "future"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("bias", "norm", "impl"), [(False, False, "fast"), (True, True, "fast"), (True, True, "default")]
)
def test_encoder_and_decoder(bias: bool, norm: bool, impl: str, dtype: torch.dtype, mask: str) -> None:
    torch.manual_seed(0)
    compare(made(EncdecMultiheadAttn, WIDTH, HEADS, 0.0, bias, norm, impl), mask, dtype, encoder=True)


def test_names_of_weights_and_how_they_are_drawn() -> None:
    torch.manual_seed(0)
    layer = SelfMultiheadAttn(64, 4, bias=True, include_norm_add=True)
    assert set(layer.state_dict()) == {
        "in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias", "lyr_nrm_gamma_weights",
        "lyr_nrm_beta_weights",
    }  # fmt: skip
    default = SelfMultiheadAttn(64, 4, include_norm_add=True, impl="default", separate_qkv_params=True)
    assert set(default.state_dict()) == {
        "q_weight", "k_weight", "v_weight", "out_proj_weight", "lyr_nrm.weight", "lyr_nrm.bias"
    }  # fmt: skip
    encdec = EncdecMultiheadAttn(64, 4, bias=True)
    assert set(encdec.state_dict()) == {
        "in_proj_weight_q", "in_proj_weight_kv", "in_proj_bias_q", "in_proj_bias_kv", "out_proj_weight",
        "out_proj_bias",
    }  # fmt: skip
    # As a matrix of 64 x 64 would be drawn, by Glorot and Bengio 2010.
    bound = math.sqrt(6.0 / 128)
    for weight in (layer.in_proj_weight, default.q_weight, encdec.in_proj_weight_kv, layer.out_proj_weight):
        assert 0.95 * bound < float(weight.detach().abs().max()) <= bound * 1.0001
    assert not layer.in_proj_bias.any()
    assert (layer.lyr_nrm_gamma_weights == 1.0).all()


def test_dropout_only_while_training() -> None:
    torch.manual_seed(0)
    layer = SelfMultiheadAttn(WIDTH, HEADS, dropout=0.5, include_norm_add=True)
    query = torch.randn(TIME, BATCH, WIDTH)
    still = [layer(query, query, query, is_training=False)[0] for _ in range(2)]
    torch.testing.assert_close(*still)
    moving = [layer(query, query, query)[0] for _ in range(2)]
    assert not torch.equal(*moving)
    # Where the output was dropped, the query alone is left.
    assert (moving[0] == query).any()


def test_softmax_of_masked_scores(half: torch.dtype) -> None:
    torch.manual_seed(0)
    scores = torch.randn(BATCH * HEADS, TIME, SOURCE).to(half)
    mask = torch.zeros(BATCH, SOURCE, dtype=torch.uint8)
    mask[1, 3:] = 1
    added = torch.randn(BATCH, SOURCE).to(half)
    for is_added, given in ((False, mask), (True, added), (False, None)):
        found = fast_mask_softmax_dropout_func(True, HEADS, scores, given, is_added, 0.0)
        for index in range(BATCH * HEADS):
            row = scores[index].double()
            if given is not None:
                own = given[index // HEADS]
                row = row + own.double() if is_added else row.masked_fill(own.bool(), -math.inf)
            torch.testing.assert_close(found[index].double(), row.softmax(-1), rtol=2e-2, atol=2e-3)
    assert (fast_mask_softmax_dropout_func(True, HEADS, scores, None, False, 0.5) == 0).any()
    assert not (fast_mask_softmax_dropout_func(False, HEADS, scores, None, False, 0.5) == 0).any()


def test_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="num_heads=4"):
        SelfMultiheadAttn(6, 4)
    with pytest.raises(UsageError, match="impl='slow'"):
        EncdecMultiheadAttn(6, 2, impl="slow")
    query, mask = torch.randn(TIME, BATCH, WIDTH), torch.zeros(TIME, TIME)
    with pytest.raises(UsageError, match="both"):
        SelfMultiheadAttn(WIDTH, HEADS)(query, key_padding_mask=torch.zeros(BATCH, TIME), attn_mask=mask)
    with pytest.raises(UsageError, match="mask_additive"):
        SelfMultiheadAttn(WIDTH, HEADS, mask_additive=True)(query, attn_mask=mask)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_by_the_names_of_apex(apex: Any, level: str) -> None:
    from apex.contrib import multihead_attn as theirs

    assert theirs.EncdecMultiheadAttn is theirs.encdec_multihead_attn.EncdecMultiheadAttn is EncdecMultiheadAttn
    assert theirs.SelfMultiheadAttn is theirs.self_multihead_attn.SelfMultiheadAttn is SelfMultiheadAttn
    assert theirs.mask_softmax_dropout_func.fast_mask_softmax_dropout_func is fast_mask_softmax_dropout_func
    torch.manual_seed(0)
    layer: Any = theirs.SelfMultiheadAttn(WIDTH, HEADS, include_norm_add=True)
    optimizer: Any = torch.optim.Adam(layer.parameters(), lr=0.02)
    layer, optimizer = apex.amp.initialize(layer, optimizer, opt_level=level, verbosity=0)
    query = torch.randn(TIME, BATCH, WIDTH)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = layer(query, query, query)[0].float().square().mean()
        with apex.amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
