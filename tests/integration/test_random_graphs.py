"""Random programs, which autograd takes through hooks, checkpoints, views and passes within passes: scaled as plain."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp

SEEDS = range(24)
Op = Callable[[Tensor], Tensor]


class Program:
    """A few training steps, all of whose choices follow from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.square, self.other = (nn.Parameter(self.normal(3, 3)) for _ in range(2))
        self.table, self.sparse = (nn.Parameter(self.normal(4, 3)) for _ in range(2))
        self.row, self.aside = (nn.Parameter(self.normal(3)) for _ in range(2))
        self.linear = nn.Linear(3, 3)
        with torch.no_grad():
            self.linear.weight.copy_(self.normal(3, 3))
            self.linear.bias.copy_(self.normal(3))
        # In no optimizer: known to the program alone.
        self.free = self.normal(3, 3).requires_grad_()
        self.stepped = [
            self.aside,
            self.square,
            self.other,
            self.row,
            self.table,
            self.sparse,
            *self.linear.parameters(),
        ]
        self.seen: list[Tensor] = []

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.numbers)

    def see(self, *tensors: Tensor | None) -> None:
        there = [tensor.detach() for tensor in tensors if tensor is not None]
        self.seen.extend((tensor.to_dense() if tensor.is_sparse else tensor).clone() for tensor in there)

    # -- what a graph is made of --

    def op(self) -> Op:
        p = self.random.choice([self.square, self.other, self.free])
        rows = torch.tensor([self.random.randrange(4) for _ in range(3)])
        ops: list[Op] = [
            lambda x: x @ p,
            lambda x: x + p.unsqueeze(0),
            lambda x: x + p[None] + self.other[None],
            lambda x: x * p.t() + p.view(1, 3, 3),
            lambda x: x + self.row,
            lambda x: x + F.embedding(rows, self.table),
            lambda x: x * F.embedding(rows, self.sparse, sparse=True),
            lambda x: torch.cat([x[..., :1], x[..., 1:] * 2], -1),
            lambda x: sum(part.expand_as(x) for part in x.split(1, -1)) * 0.5,
            lambda x: x.tanh(),
            lambda x: self.linear(x),
            lambda x: x + x.detach() * self.row,
        ]
        return self.random.choice(ops)

    def chain(self, depth: int = 0) -> Op:
        parts = []
        for _ in range(self.random.randint(1, 3)):
            kind = self.random.choice(["op", "op", "hooked", "checkpoint", "retained"] if depth < 2 else ["op"])
            inner = self.op() if kind in ("op", "hooked", "retained") else self.chain(depth + 1)
            parts.append(getattr(self, kind)(inner) if kind != "op" else inner)

        def run(x: Tensor) -> Tensor:
            for part in parts:
                x = part(x)
            return x.tanh()

        return run

    def checkpoint(self, inner: Op) -> Op:
        reentrant = self.random.random() < 0.5
        # Torch refuses these with inputs= and a second time.
        self.reentrant |= reentrant
        return lambda x: checkpoint(inner, x, use_reentrant=reentrant)

    def retained(self, inner: Op) -> Op:
        def run(x: Tensor) -> Tensor:
            y = inner(x)
            if y.requires_grad:
                y.retain_grad()
                self.kept.append(y)
            return y

        return run

    def hooked(self, inner: Op) -> Op:
        hook = self.hook()

        def run(x: Tensor) -> Tensor:
            y = inner(x)
            if y.requires_grad:
                y.register_hook(hook)
            return y

        return run

    def hook(self) -> Callable[[Tensor], Any]:
        # It has no hooks, which would call themselves.
        p = self.aside

        def runs_a_pass(gradient: Tensor) -> None:
            with torch.enable_grad():
                (p * gradient.detach().abs().sum()).sum().backward()

        def asks(gradient: Tensor) -> None:
            with torch.enable_grad():
                self.see(torch.autograd.grad((p.square()).sum(), p)[0])

        hooks: list[Callable[[Tensor], Any]] = [
            lambda g: -g,
            lambda g: g.clamp(-0.1, 0.1),
            lambda g: self.see(g),
            lambda g: g * 2,
            lambda g: self.see(self.square.grad, self.linear.bias.grad, self.row.grad),
            runs_a_pass,
            asks,
        ]
        return self.random.choice(hooks)

    # -- what is done with it --

    def once(self) -> None:
        for p in self.stepped:
            if self.random.random() < 0.2 and p is not self.sparse and p is not self.aside:
                self.registered.append(p.register_hook(self.hook()))
            if self.random.random() < 0.2:
                self.registered.append(p.register_post_accumulate_grad_hook(lambda p: self.see(p.grad)))
        if self.random.random() < 0.3:
            self.registered.append(
                self.linear.register_full_backward_hook(lambda module, into, out: self.see(*into, *out))
            )

    def backward(self, x: Tensor) -> None:
        self.reentrant = False
        out = self.chain()(self.chain()(x))
        way = self.random.choice(["sum", "sum", "given", "several", "inputs", "twice"])
        if way == "sum":
            out.square().sum().backward()
        elif way == "given":
            out.backward(self.normal(*out.shape))
        elif way == "several":
            torch.autograd.backward([out.sum(), out.square()], [None, torch.ones_like(out)])  # type: ignore[list-item]
        elif way == "inputs" and not self.reentrant:
            (out.sum() + self.square.sum() + self.row.sum()).backward(inputs=[self.square, self.row])
        elif way == "twice" and not self.reentrant:
            out.mean().backward(retain_graph=True)
            out.sum().backward()
        else:
            out.mean().backward()

    def run(self) -> list[Tensor]:
        optimizer = torch.optim.SGD([p for p in self.stepped if p is not self.sparse], lr=0.1, momentum=0.9)
        sparse = torch.optim.SGD([self.sparse], lr=0.1)
        self.registered: list[Any] = []
        self.once()
        for _ in range(2):
            for _ in range(self.random.randint(1, 3)):
                self.kept: list[Tensor] = []
                # Not 1, with which torch lets gradients of views share memory, and adds to both at once.
                x = self.normal(self.random.choice([2, 3]), 3, 3).requires_grad_()
                self.backward(x)
                self.see(x.grad, *(kept.grad for kept in self.kept), *(p.grad for p in (*self.stepped, self.free)))
            if self.random.random() < 0.3:
                self.see(nn.utils.clip_grad_norm_([self.square, self.row], 0.5))
            optimizer.step()
            sparse.step()
            for each in (optimizer, sparse):
                each.zero_grad(set_to_none=self.random.random() < 0.5)
        self.see(*self.stepped)
        return self.seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_computes_what_it_computes_without(seed: int) -> None:
    plain = Program(seed).run()
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, lists={"extends": []})
    handle.auto_scale()
    scaled = Program(seed).run()
    assert handle.skipped_steps == 0
    assert handle.loss_scale == 2.0**16
    handle.deactivate()
    assert len(plain) > 10
    torch.testing.assert_close(scaled, plain, rtol=2e-5, atol=1e-6)
