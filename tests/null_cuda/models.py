"""Models that are compared: small ones of each kind, and the shapes of ResNet-50, BERT-base and GPT-2-small."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.models import CLASSES, ResNet18, Transformer

WIDTH, BATCH, LENGTH = 64, 8, 16
Batch = tuple[nn.Module, Tensor, Tensor]


class _Attention(nn.Module):
    """`nn.MultiheadAttention` between two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.GroupNorm(4, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        return self.after((x + y).transpose(1, 2)).mean(2)


class _Recurrent(nn.Module):
    """Two layers in both directions, and a linear layer over what the last step gives."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = kind(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


class _Cells(nn.Module):
    """An LSTM's cell and a GRU's, called step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = c = other = x.new_zeros(len(x), WIDTH)
        for step in x.unbind(1)[:4]:
            h, c = self.lstm(step, (h, c))
            other = self.gru(h, other)
        return self.head(other)


class _Encoder(nn.Module):
    """`nn.TransformerEncoder`, a linear layer over the mean of its words."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.LayerNorm(4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, CLASSES)
    )


def _vectors(make: Callable[[], nn.Module], *shape: int) -> Callable[[], Batch]:
    return lambda: (make(), torch.randn(BATCH, *shape), torch.randint(CLASSES, (BATCH,)))


def _words(make: Callable[[], nn.Module], count: int, batch: int, length: int) -> Callable[[], Batch]:
    return lambda: (make(), torch.randint(count, (batch, length)), torch.randint(count, (batch, length)))


MODELS: dict[str, Callable[[], Batch]] = {
    "mlp": _vectors(_mlp, WIDTH),
    "resnet": _vectors(lambda: ResNet18(16), 3, 64, 64),
    "decoder": _words(lambda: Transformer(WIDTH, blocks=2, heads=4, words=128), 128, BATCH, LENGTH),
    "transformer": _vectors(_Encoder, LENGTH, WIDTH),
    "attention": _vectors(_Attention, LENGTH, WIDTH),
    "lstm": _vectors(lambda: _Recurrent(nn.LSTM), LENGTH, WIDTH),
    "gru": _vectors(lambda: _Recurrent(nn.GRU), LENGTH, WIDTH),
    "cells": _vectors(_Cells, LENGTH, WIDTH),
}


class _Layer(nn.Module):
    """A layer of BERT or GPT-2: the one has its norms behind what is added, the other before."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=self.causal)
        return self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)))

    def widen(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x), approximate="tanh" if self.causal else "none")))

    def forward(self, x: Tensor) -> Tensor:
        if self.causal:
            x = x + self.attend(self.norm_1(x))
            return x + self.widen(self.norm_2(x))
        x = self.norm_1(x + self.attend(x))
        return self.norm_2(x + self.widen(x))


class LanguageModel(nn.Module):
    """BERT with its head for masked words, or GPT-2: 12 layers of width 768 and 12 heads; words share their weight."""

    def __init__(self, words: int, positions: int, *, causal: bool, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.layers = nn.Sequential(*(_Layer(width, width // 64, causal=causal) for _ in range(layers)))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.transform = None if causal else nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x) + self.positions.weight[: x.shape[1]]
        if self.transform is None:
            y = self.norm(self.layers(self.dropout(y)))
        else:
            y = self.transform(self.layers(self.dropout(self.norm(y))))
        return F.linear(y, self.words.weight)


def _resnet50() -> nn.Module:
    import torchvision

    return torchvision.models.resnet50()


LARGE: dict[str, Callable[[], Batch]] = {
    "ResNet-50, 16 x 224 x 224": lambda: (_resnet50(), torch.randn(16, 3, 224, 224), torch.randint(1000, (16,))),
    "BERT-base, 8 x 512": _words(lambda: LanguageModel(30522, 512, causal=False), 30522, 8, 512),
    "GPT-2-small, 2 x 1024": _words(lambda: LanguageModel(50257, 1024, causal=True), 50257, 2, 1024),
}
