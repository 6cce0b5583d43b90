"""Models that are measured: the shapes of a transformer, ResNet-18 and a recurrent net, at any width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


class _Block(nn.Module):
    """A block of a transformer: attention with a projection each for query, key and value, and two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm_1(x)
        q, k, v = (
            layer(y).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """Blocks between an embedding and a linear layer over the words: logits of shape ``[batch, length, words]``."""

    def __init__(self, width: int, blocks: int = 4, heads: int = 2, words: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(x))))


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.conv_2(F.relu(self.norm_1(self.conv_1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """The 18 layers of He et al. (2016), table 1, for images of any size; ``width`` is 64 there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        stages, before = [], width
        for number in range(4):
            after = width << number
            stages += [_Residual(before, after, 2 if number else 1), _Residual(after, after, 1)]
            before = after
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class Recurrent(nn.Module):
    """Two layers of an LSTM over vectors, and a linear layer over what the last step gives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def transformer(width: int = 16, batch: int = 2, length: int = 4, **settings: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a transformer, its input and its targets."""
    model = Transformer(width, **settings)
    words = torch.randint(0, model.head.out_features, (batch, length + 1))
    return model, words[:, :-1], words[:, 1:]


def resnet(width: int = 4, batch: int = 2, size: int = 32) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a ResNet-18, its input and its targets."""
    return ResNet18(width), torch.randn(batch, 3, size, size), torch.randint(0, CLASSES, (batch,))


def lstm(width: int = 16, batch: int = 2, length: int = 4) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a recurrent net, its input and its targets."""
    return Recurrent(width), torch.randn(batch, length, width), torch.randint(0, CLASSES, (batch,))


MAKERS = {"transformer": transformer, "ResNet-18": resnet, "LSTM": lstm}
"""By name, what makes a model with its input and its targets; each takes ``width`` and ``batch``."""
