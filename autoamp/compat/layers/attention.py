"""`apex.contrib.multihead_attn`: attention (Vaswani et al. 2017, arXiv:1706.03762) with Apex's layout of weights."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoamp.errors import UsageError
from autoamp.normalization import FusedLayerNorm, fused_layer_norm_affine

__all__ = ["EncdecMultiheadAttn", "SelfMultiheadAttn", "fast_mask_softmax_dropout_func"]


class _MultiheadAttn(nn.Module):
    """What both kinds share: the layer norm before, the sum after, the masks, and the attention itself."""

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float, bias: bool, include_norm_add: bool, impl: str
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise UsageError(f"embed_dim={embed_dim} must be a multiple of num_heads={num_heads}")
        if impl not in ("fast", "default"):
            raise UsageError(f"impl={impl!r} is unknown; choose 'fast' or 'default', which compute the same here")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.dropout, self.bias, self.include_norm_add, self.impl = dropout, bias, include_norm_add, impl
        self.scaling = self.head_dim**-0.5
        self.mask_additive = False
        self.out_proj_weight = _weight(embed_dim, embed_dim)
        self.out_proj_bias = _weight(embed_dim) if bias else None
        # The names that each of Apex's two implementations had, so that its checkpoints load.
        if include_norm_add and impl == "fast":
            self.lyr_nrm_gamma_weights, self.lyr_nrm_beta_weights = _weight(embed_dim), _weight(embed_dim)
        self.lyr_nrm = FusedLayerNorm(embed_dim) if include_norm_add and impl != "fast" else None

    def _reset(self, weights: dict[str, float]) -> None:
        """Draw weights by Xavier's uniform rule, and set biases to 0 and the norm to 1 and 0.

        Args:
            weights: The gain by the name of the parameter; ``out_proj_weight`` comes on top, with 1.
        """
        for name, gain in {**weights, "out_proj_weight": 1.0}.items():
            nn.init.xavier_uniform_(getattr(self, name), gain=gain)
        for name, param in self.named_parameters(recurse=False):
            if name.endswith(("_bias", "_bias_q", "_bias_kv", "_beta_weights")):
                nn.init.zeros_(param)
            elif name.endswith("_gamma_weights"):
                nn.init.ones_(param)
        if self.lyr_nrm is not None:
            self.lyr_nrm.reset_parameters()

    def _normed(self, query: Tensor) -> Tensor:
        """Return the input after the layer norm, or as it is without ``include_norm_add``."""
        if not self.include_norm_add:
            return query
        if self.lyr_nrm is not None:
            normed: Tensor = self.lyr_nrm(query)
            return normed
        weight, bias = self.lyr_nrm_gamma_weights, self.lyr_nrm_beta_weights
        return fused_layer_norm_affine(query, weight, bias, self.embed_dim, 1e-5)

    def _attended(
        self, query: Tensor, projected: tuple[Tensor, Tensor, Tensor], padding: Tensor | None, future: Tensor | None,
        training: bool,
    ) -> Tensor:  # fmt: skip
        """Return the output for queries, keys and values of shape ``(time, batch, heads, head_dim)``."""
        mask = self._mask(padding, future)
        queries, keys, values = (tensor.permute(1, 2, 0, 3) for tensor in projected)
        if mask is not None and mask.dtype is not torch.bool:
            mask = mask.to(queries.dtype)
        dropout = self.dropout if training else 0.0
        found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout)
        found = found.permute(2, 0, 1, 3).flatten(2)
        out = F.linear(found, self.out_proj_weight, self.out_proj_bias)
        return F.dropout(out, self.dropout, training) + query if self.include_norm_add else out

    def _mask(self, padding: Tensor | None, future: Tensor | None) -> Tensor | None:
        """Return the mask for torch's attention: bool, True where a key counts, or numbers to add to the scores."""
        if padding is not None and future is not None:
            raise UsageError("key_padding_mask and attn_mask cannot both be given; combine them into one mask")
        if future is not None:
            if self.mask_additive:
                raise UsageError("attn_mask cannot be given with mask_additive=True, which is for key_padding_mask")
            return ~future.bool()
        if padding is None:
            return None
        padding = padding[:, None, None]
        return padding if self.mask_additive else ~padding.bool()


class SelfMultiheadAttn(_MultiheadAttn):
    """Self-attention, with the weights of queries, keys and values in one matrix, head by head.

    Args:
        embed_dim: The number of features.
        num_heads: The number of heads.
        dropout: The share that dropout sets to 0, of the attention and, with ``include_norm_add``, of the output.
        bias: Whether the projections have biases.
        include_norm_add: Whether the input is layer normed first, and added to the output.
        impl: ``"fast"`` or ``"default"``, which compute the same. With ``include_norm_add`` they differ in the names
            of the norm's parameters.
        separate_qkv_params: Whether queries, keys and values have matrices of their own.
        mask_additive: Whether ``key_padding_mask`` holds numbers that are added to the scores.

    Raises:
        UsageError: ``embed_dim`` is no multiple of ``num_heads``, or ``impl`` is unknown.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = False, include_norm_add: bool = False,
        impl: str = "fast", separate_qkv_params: bool = False, mask_additive: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        self.separate_qkv_params, self.mask_additive = separate_qkv_params, mask_additive
        if separate_qkv_params:
            self.q_weight, self.k_weight, self.v_weight = (_weight(embed_dim, embed_dim) for _ in range(3))
            self.q_bias, self.k_bias, self.v_bias = (_weight(embed_dim) if bias else None for _ in range(3))
        else:
            self.in_proj_weight = _weight(3 * embed_dim, embed_dim)
            self.in_proj_bias = _weight(3 * embed_dim) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew; queries, keys and values in one matrix get the spread of three matrices."""
        each = {"q_weight": 1.0, "k_weight": 1.0, "v_weight": 1.0}
        self._reset(each if self.separate_qkv_params else {"in_proj_weight": math.sqrt(2.0)})

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None,
        key_padding_mask: Tensor | None = None, need_weights: bool = False, attn_mask: Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Return the output, shape ``(time, batch, embed_dim)``, and None in the place of the attention.

        Args:
            query: Shape ``(time, batch, embed_dim)``.
            key: No effect: keys are computed from ``query``.
            value: No effect, likewise.
            key_padding_mask: Shape ``(batch, time)``: not 0 where a key is padding; with ``mask_additive`` numbers
                that are added to the scores.
            need_weights: No effect.
            attn_mask: Shape ``(time, time)``: not 0 where a query (row) must not see a key (column).
            is_training: Whether there is dropout.

        Raises:
            UsageError: Both masks are given, or ``attn_mask`` with ``mask_additive``.
        """
        given = self._normed(query)
        if self.separate_qkv_params:
            pairs = [(self.q_weight, self.q_bias), (self.k_weight, self.k_bias), (self.v_weight, self.v_bias)]
            queries, keys, values = (F.linear(given, *pair).unflatten(2, (self.num_heads, -1)) for pair in pairs)
        else:
            # The rows of the matrix are ordered by head, then queries, keys and values.
            projected = F.linear(given, self.in_proj_weight, self.in_proj_bias)
            queries, keys, values = projected.unflatten(2, (self.num_heads, 3, -1)).unbind(3)
        return self._attended(query, (queries, keys, values), key_padding_mask, attn_mask, is_training), None


class EncdecMultiheadAttn(_MultiheadAttn):
    """Attention of a decoder to an encoder, with the weights of keys and values in one matrix, head by head.

    Args:
        embed_dim: The number of features.
        num_heads: The number of heads.
        dropout: The share that dropout sets to 0, of the attention and, with ``include_norm_add``, of the output.
        bias: Whether the projections have biases.
        include_norm_add: Whether the query is layer normed first, and added to the output.
        impl: ``"fast"`` or ``"default"``, which compute the same. With ``include_norm_add`` they differ in the names
            of the norm's parameters.

    Raises:
        UsageError: ``embed_dim`` is no multiple of ``num_heads``, or ``impl`` is unknown.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = False, include_norm_add: bool = False,
        impl: str = "fast",
    ) -> None:  # fmt: skip
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        self.in_proj_weight_q, self.in_proj_weight_kv = _weight(embed_dim, embed_dim), _weight(2 * embed_dim, embed_dim)
        self.in_proj_bias_q = _weight(embed_dim) if bias else None
        self.in_proj_bias_kv = _weight(2 * embed_dim) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew; keys and values in one matrix get the spread of two matrices."""
        self._reset({"in_proj_weight_q": 1.0, "in_proj_weight_kv": math.sqrt(1.5)})

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor | None = None, key_padding_mask: Tensor | None = None,
        need_weights: bool = False, attn_mask: Tensor | None = None, is_training: bool = True,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Return the output, shape ``(time, batch, embed_dim)``, and None in the place of the attention.

        Args:
            query: The decoder's, shape ``(time, batch, embed_dim)``.
            key: The encoder's, shape ``(source, batch, embed_dim)``, for keys and values.
            value: No effect: values are computed from ``key``.
            key_padding_mask: Shape ``(batch, source)``: not 0 where a key is padding.
            need_weights: No effect.
            attn_mask: Shape ``(time, source)``: not 0 where a query must not see a key.
            is_training: Whether there is dropout.

        Raises:
            UsageError: Both masks are given.
        """
        queries = F.linear(self._normed(query), self.in_proj_weight_q, self.in_proj_bias_q)
        both = F.linear(key, self.in_proj_weight_kv, self.in_proj_bias_kv)
        keys, values = both.unflatten(2, (self.num_heads, 2, -1)).unbind(3)
        projected = (queries.unflatten(2, (self.num_heads, -1)), keys, values)
        return self._attended(query, projected, key_padding_mask, attn_mask, is_training), None


def fast_mask_softmax_dropout_func(
    is_training: bool, heads: int, inputs: Tensor, pad_mask: Tensor | None, mask_additive: bool, dropout_prob: float
) -> Tensor:
    """Return the softmax of masked scores, with dropout while training.

    Args:
        is_training: Whether there is dropout.
        heads: The number of heads.
        inputs: Scores, shape ``(batch * heads, queries, keys)``.
        pad_mask: Shape ``(batch, keys)``: not 0 where a key is padding; with ``mask_additive`` numbers that are added.
        mask_additive: See ``pad_mask``.
        dropout_prob: The share that dropout sets to 0.

    Returns:
        Shape ``(batch * heads, queries, keys)``.
    """
    if pad_mask is not None:
        mask = pad_mask.repeat_interleave(heads, dim=0)[:, None]
        inputs = inputs + mask if mask_additive else inputs.masked_fill(mask.bool(), -math.inf)
    return F.dropout(torch.softmax(inputs, dim=-1), dropout_prob, is_training)


def _weight(*shape: int) -> Any:
    return nn.Parameter(torch.empty(shape))
