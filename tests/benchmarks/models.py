"""Models that are measured, and the cases: a transformer, ResNet-18, an LSTM and a U-Net, each with its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


class UNet(nn.Module):
    """Three levels of convolutions down and up again, joined level by level: a class for each pixel, classes last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide, wider = 2 * width, 4 * width
        self.down = nn.ModuleList([_convolutions(3, width), _convolutions(width, wide)])
        self.bottom = _convolutions(wide, wider)
        self.grow = nn.ModuleList([nn.ConvTranspose2d(wider, wide, 2, 2), nn.ConvTranspose2d(wide, width, 2, 2)])
        self.up = nn.ModuleList([_convolutions(wider, wide), _convolutions(wide, width)])
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for layer in self.down:
            x = layer(x)
            levels.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, layer in zip(self.grow, self.up, strict=True):
            x = layer(torch.cat([levels.pop(), grow(x)], 1))
        return self.head(x).movedim(1, -1)


def _convolutions(before: int, after: int) -> nn.Sequential:
    """Return two convolutions, each with its norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
    )  # fmt: skip


Batch = tuple[nn.Module, Tensor, Tensor]


def _transformer(width: int, batch: int, length: int) -> Batch:
    words = torch.randint(0, 1000, (batch, length + 1))
    return Transformer(width, heads=8, words=1000), words[:, :-1], words[:, 1:]


def _image(model: nn.Module, batch: int, *pixels: int) -> Batch:
    return model, torch.randn(batch, 3, 128, 128), torch.randint(0, CLASSES, (batch, *pixels))


def _lstm(batch: int, length: int) -> Batch:
    return Recurrent(512), torch.randn(batch, length, 512), torch.randint(0, CLASSES, (batch,))


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        make: Makes the model, its inputs and its targets.
        threads: How many threads torch gets.
        compiled: Whether the compiled ways are measured with ``--quick`` too: compiling takes most of the time.
    """

    make: Callable[[], Batch]
    threads: int = 1
    compiled: bool = False


CASES = {
    "transformer 512, 8 x 64": Case(lambda: _transformer(512, 8, 64), compiled=True),
    "transformer 512, 8 x 64, 2 threads": Case(lambda: _transformer(512, 8, 64), threads=2),
    "transformer 512, 2 x 16": Case(lambda: _transformer(512, 2, 16)),
    "transformer 512, 32 x 128, 2 threads": Case(lambda: _transformer(512, 32, 128), threads=2),
    "ResNet-18, 8 x 128 x 128": Case(lambda: _image(ResNet18(64), 8)),
    "ResNet-18, 8 x 128 x 128, 2 threads": Case(lambda: _image(ResNet18(64), 8), threads=2),
    "LSTM 512, 8 x 32": Case(lambda: _lstm(8, 32)),
    "U-Net 32, 2 x 128 x 128": Case(lambda: _image(UNet(32), 2, 128, 128)),
    "host overhead: transformer 16, 2 x 4": Case(lambda: _transformer(16, 2, 4)),
}
"""By the name that the table shows."""
