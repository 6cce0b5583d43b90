"""Names and first values of attention weights, dropout, and the softmax of masked scores."""

from __future__ import annotations

import math

import pytest
import torch

from autoamp.compat.layers.attention import EncdecMultiheadAttn, SelfMultiheadAttn, fast_mask_softmax_dropout_func
from autoamp.errors import UsageError

HEADS, WIDTH, TIME, SOURCE, BATCH = 2, 6, 4, 5, 3


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
        expected = scores.double().unflatten(0, (BATCH, HEADS))
        if given is not None:
            own = given[:, None, None]
            expected = expected + own.double() if is_added else expected.masked_fill(own.bool(), -math.inf)
        torch.testing.assert_close(found.double(), expected.softmax(-1).flatten(0, 1), rtol=2e-2, atol=2e-3)
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
