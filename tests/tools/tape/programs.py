"""Programs drawn at random for tapes: a forward pass, a loss and a backward pass, which write to what they like."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoamp.tools.tape import Op, Rerun, Tape

WIDTH, TOKENS, BATCH = 16, 6, 4


class Scaled(torch.autograd.Function):
    """A function of the program's own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


class Program(nn.Module):
    """A model of a few blocks, each ``(batch, tokens, width)`` to the same, and what a step of it writes to.

    Args:
        seed: Which blocks, and their weights.
        blocks: How many.
    """

    def __init__(self, seed: int, blocks: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        chosen = random.Random(seed).sample(sorted(self.kinds()), blocks)
        self.order = chosen
        self.embedding = nn.Embedding(20, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.2, batch_first=True)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 5)
        self.register_buffer("queue", torch.zeros(8, WIDTH))
        self.outside = torch.zeros(WIDTH)
        self.counts = numpy.zeros(1)
        self.calls = 0

    def kinds(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """The blocks by name."""
        return {
            "linear": lambda x: torch.relu(self.linear(x)),
            "dropout": lambda x: F.dropout(x, 0.3) + F.dropout(x, 0.1),
            "fused dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
            "norm": lambda x: self.norm(x),
            "batch norm": lambda x: self.batch_norm(x.transpose(1, 2)).transpose(1, 2),
            "conv": lambda x: self.conv(x.transpose(1, 2)).transpose(1, 2),
            "lstm": lambda x: self.lstm(x)[0],
            "attention": lambda x: self.attention(x, x, x, need_weights=False)[0],
            "layer": lambda x: self.layer(x),
            "in place": self._in_place,
            "views": self._views,
            "parts": lambda x: torch.cat([part.clone().mul_(2) for part in x.chunk(2, -1)], -1),
            "masked": lambda x: x.masked_fill(torch.eye(TOKENS, WIDTH) > 0, -math.inf).softmax(-1) * 3,
            "chosen": lambda x: x + x[:, x.float().mean((0, 2)).argsort()],
            "reentrant": lambda x: checkpoint(self._inner, x, use_reentrant=True),
            "checkpoint": lambda x: checkpoint(self._inner, x, use_reentrant=False),
            "function": lambda x: Scaled.apply(x),
            "teacher": self._follow_teacher,
            "queue": self._enqueue,
            "data": self._write_data,
            "numpy": self._write_numpy,
            "complex": lambda x: torch.fft.irfft(torch.fft.rfft(x.float()) * 0.5, n=WIDTH).to(x.dtype),
            "double use": lambda x: x * x + self.linear(x) * self.linear(x),
            "einsum": lambda x: torch.einsum("btw,vw->btv", x, self.linear.weight.to(x.dtype)),
        }

    def _inner(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.linear(x)), 0.2)

    def _in_place(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y.copy_(x)
        y.add_(1).mul_(0.5)
        y[:, 0] = 0
        y[:, 1:].clamp_(-2, 2)
        return y

    def _views(self, x: Tensor) -> Tensor:
        flat = (x * 1.0).contiguous().view(-1, WIDTH)
        row = flat[1]
        flat[:2].mul_(3)
        flat.t()[3].add_(row.sum())
        return flat.as_strided((BATCH, TOKENS, WIDTH), (TOKENS * WIDTH, WIDTH, 1)) + row

    @torch.no_grad()
    def _follow_teacher(self, x: Tensor) -> Tensor:
        for theirs, ours in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
            theirs.mul_(0.9).add_(ours, alpha=0.1)
        return x + self.teacher(x.to(self.teacher.weight.dtype)).to(x.dtype)

    def _enqueue(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.queue = torch.roll(self.queue, 1, 0)
            self.queue[0] = x.float().mean((0, 1))
            self.outside += self.queue[0]
        return x + self.queue.mean(0).to(x.dtype)

    def _write_data(self, x: Tensor) -> Tensor:
        self.teacher.weight.data.mul_(0.99)
        self.teacher.bias.data = self.teacher.bias.data + 1
        return x + self.teacher(x.to(self.teacher.weight.dtype)).to(x.dtype)

    def _write_numpy(self, x: Tensor) -> Tensor:
        self.counts += x.detach().float().mean().item()
        return x * float(self.counts[0] > -100)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embedding(tokens)
        kinds = self.kinds()
        for name in self.order:
            x = kinds[name](x)
        return self.head(x)

    def loss(self) -> Tensor:
        """Return the loss of a step, of which the gradients are in ``.grad``."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(20, (BATCH, TOKENS), generator=generator)
        targets = torch.randint(5, (BATCH * TOKENS,), generator=generator)
        loss = F.cross_entropy(self(tokens).flatten(0, 1).float(), targets)
        loss.backward()
        return loss.detach()

    def written(self) -> list[Tensor]:
        """Return copies of all that a step may have written to."""
        own = [*self.parameters(), *self.buffers(), self.outside, torch.from_numpy(self.counts)]
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        return [tensor.detach().clone() for tensor in (*own, *grads, torch.tensor(self.calls))]


def last_value(tape: Tape, tensor: Tensor, in_fp32: Callable[[Op], bool] = lambda op: False) -> Tensor:
    """Return the value of a tensor at the end of a run of its tape."""
    ref = tape.find(tensor)
    assert ref is not None
    return Rerun(tape, in_fp32).finish().value(ref)
