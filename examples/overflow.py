"""A model with a planted fault, to see what a report tells of it: a gate that squares large values in fp16.

    autoamp run --device-type cpu --dtype fp16 --report report.html examples/overflow.py

The report names the line of the product, and the entry for autoamp.toml that runs it in fp32.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn


class Gate(nn.Module):
    """Gates by the square of its inputs: y * y overflows fp16 from 256 on, where inf / inf is nan."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``: (batch, width)."""
        y = self.project(x)
        square = y * y
        gated: Tensor = x + square / (1.0 + square)
        return gated


class Model(nn.Module):
    """A small classifier: an embedding, three blocks with layer norms, one of which has a gate, and a head."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(32, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(2)
        )
        self.gate = Gate(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for ``x`` of shape (batch, 32)."""
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(self.gate(x))
        return logits


def main(argv: list[str] | None = None) -> None:
    """Train for some steps on random data, of which each twentieth batch has values that the gate cannot square."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args(argv).steps
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        x = torch.randn(64, 32)
        if step % 20 == 15:
            x[7] *= 4000.0
        target = torch.randint(0, 10, (64,))
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
