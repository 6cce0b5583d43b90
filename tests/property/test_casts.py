"""Graphs of ops drawn at random: dtypes, values and gradients are those that the lists say.

A value is a matrix of 4 by 4, so every op takes every value. The reference casts the arguments of each op by hand, as
the list says, and calls plain torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autoamp
from autoamp.core import CastPolicy, CastTable

# Torch is patched anew for each graph.
MANY = settings(max_examples=settings.default.max_examples // 2)
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
Call = Callable[["Op", nn.Module, list[Tensor]], Tensor]


@pytest.fixture(scope="module", autouse=True)
def half_units() -> Iterator[None]:
    """A CPU with units for both halves, which computes attention in half precision: without, fp32 is faster."""
    with pytest.MonkeyPatch.context() as patched:
        has = {**torch.cpu.get_capabilities(), "amx_bf16": True, "avx512_fp16": True}
        patched.setattr(torch.cpu, "get_capabilities", lambda: has)
        yield


@dataclass(frozen=True)
class Op:
    """An op, and under which name the lists have it.

    Attributes:
        target: The name in the lists.
        run: Takes the module that has the parameters, and one or more values.
        arity: How many values.
        owns: The parameters of the module that it uses: a prefix of their names; None for none.
    """

    target: str
    run: Callable[..., Any]
    arity: int = 1
    owns: str | None = None


def _ops() -> dict[str, Op]:
    # What is done with a value before the op that is meant must be exact, as the reference casts first.
    # By name, at the time of the call: what holds a function of torch itself is not patched.
    one: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
        "softmax": ("softmax", lambda x: x.softmax(-1)),
        "F.softmax": ("softmax", lambda x: F.softmax(x, -1)),
        "log_softmax": ("log_softmax", lambda x: torch.log_softmax(x, 0)),
        "exp": ("exp", lambda x: x.exp()),
        "expm1": ("expm1", lambda x: torch.expm1(x)),
        "log1p": ("log1p", lambda x: x.abs().log1p()),
        "pow": ("pow", lambda x: x.pow(2)),
        "power": ("__pow__", lambda x: x**2),
        "square": ("square", lambda x: torch.square(x)),
        "rsqrt": ("rsqrt", lambda x: torch.rsqrt(x.abs().clamp(min=0.25))),
        "softplus": ("softplus", lambda x: F.softplus(x)),
        "tan": ("tan", lambda x: x.clamp(-1, 1).tan()),
        "cumsum": ("cumsum", lambda x: x.cumsum(-1)),
        "prod": ("prod", lambda x: x.prod(-1, keepdim=True).expand(4, 4)),
        "sum": ("sum", lambda x: x.sum(0, keepdim=True).expand(4, 4)),
        "logsumexp": ("logsumexp", lambda x: x.logsumexp(1, keepdim=True).expand(4, 4)),
        "norm": ("norm", lambda x: x.norm(dim=1, keepdim=True).expand(4, 4)),
        "layer_norm": ("layer_norm", lambda x: F.layer_norm(x, (4,))),
        "group_norm": ("group_norm", lambda x: F.group_norm(x[None], 2)[0]),
        "rms_norm": ("rms_norm", lambda x: F.rms_norm(x, (4,))),
        "relu": ("relu", lambda x: F.relu(x)),
        "tanh": ("tanh", lambda x: torch.tanh(x)),
        "gelu": ("gelu", lambda x: F.gelu(x)),
        "mean": ("mean", lambda x: x.mean(0, keepdim=True).expand(4, 4)),
        "view": ("view", lambda x: x.contiguous().view(2, 8).view(4, 4)),
        "t": ("t", lambda x: x.t()),
        "dropout": ("dropout", lambda x: F.dropout(x, 0.0)),
        "chain": ("mul", lambda x: (x * 0.5 + 1) / 2),
        "max_pool": ("max_pool1d", lambda x: F.max_pool1d(x[None], 3, 1, 1)[0]),
    }
    two: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
        "matmul": ("matmul", lambda x, y: torch.matmul(x, y)),
        "@": ("__matmul__", lambda x, y: x @ y),
        "mm": ("mm", lambda x, y: x.mm(y)),
        "bmm": ("bmm", lambda x, y: torch.bmm(x[None], y[None])[0]),
        "einsum": ("einsum", lambda x, y: torch.einsum("ij,kj->ik", x, y)),
        "mv": ("mv", lambda x, y: torch.mv(x, y[0])[None].expand(4, 4)),
        "F.linear": ("linear", lambda x, y: F.linear(x, y)),
        "conv1d": ("conv1d", lambda x, y: F.conv1d(x[None], y[:, :, None])[0]),
        "attention": (
            "scaled_dot_product_attention", lambda x, y: F.scaled_dot_product_attention(x[None], y[None], x[None])[0]
        ),
        "prelu": ("prelu", lambda x, y: F.prelu(x, y[0])),
        "add": ("add", lambda x, y: torch.add(x, y)),
        "mul": ("mul", lambda x, y: x * y),
        "where": ("where", lambda x, y: torch.where(x > 0, x, y)),
        "add_": ("add", lambda x, y: x.clone().add_(y)),
        "cat": ("cat", lambda x, y: torch.cat([x, y])[2:6]),
        "stack": ("stack", lambda x, y: torch.stack([x, y])[1]),
        "atan2": ("atan2", lambda x, y: torch.atan2(x, y)),
        "lerp": ("lerp", lambda x, y: torch.lerp(x, y, 0.25)),
        "dot": ("dot", lambda x, y: torch.dot(x[0], y[1])[None, None].expand(4, 4)),
        "cross": ("cross", lambda x, y: F.pad(torch.linalg.cross(x[:, :3], y[:, :3]), (0, 1))),
        "index_add": ("index_add", lambda x, y: x.index_add(0, torch.arange(4), y)),
        "scatter_add": ("scatter_add", lambda x, y: x.scatter_add(0, torch.zeros(4, 4, dtype=torch.int64), y)),
        "mse_loss": ("mse_loss", lambda x, y: F.mse_loss(x, y, reduction="none")),
        "l1_loss": ("l1_loss", lambda x, y: F.l1_loss(x, y)[None, None].expand(4, 4)),
        "smooth_l1_loss": ("smooth_l1_loss", lambda x, y: F.smooth_l1_loss(x, y, reduction="none")),
        "with_logits": ("binary_cross_entropy_with_logits",
                        lambda x, y: F.binary_cross_entropy_with_logits(x, y.clamp(0, 1), reduction="none")),
        "cosine_similarity": ("cosine_similarity", lambda x, y: F.cosine_similarity(x, y)[None].expand(4, 4)),
        "cdist": ("cdist", lambda x, y: torch.cdist(x, y)),
        "dist": ("dist", lambda x, y: torch.dist(x, y)[None, None].expand(4, 4)),
        "tensordot": ("tensordot", lambda x, y: torch.tensordot(x, y, 1)),
    }  # fmt: skip
    three: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
        "addmm": ("addmm", lambda x, y, z: torch.addmm(x, y, z)),
        "baddbmm": ("baddbmm", lambda x, y, z: torch.baddbmm(x[None], y[None], z[None])[0]),
        "addcmul": ("addcmul", lambda x, y, z: torch.addcmul(x, y, z)),
        "linear with bias": ("linear", lambda x, y, z: F.linear(x, y, z[0])),
    }
    ops = {
        name: Op(target, lambda _, *values, run=run: run(*values), arity)
        for arity, table in ((1, one), (2, two), (3, three))
        for name, (target, run) in table.items()
    }
    return ops | {
        "Linear": Op("linear", lambda net, x: net.linear(x), owns="linear"),
        "Linear again": Op("linear", lambda net, x: F.linear(x, net.linear.weight), owns="linear"),
        "Conv1d": Op("conv1d", lambda net, x: net.conv(x[None])[0], owns="conv"),
        "LayerNorm": Op("layer_norm", lambda net, x: net.norm(x), owns="norm"),
        "GRU": Op("gru", lambda net, x: net.gru(x)[0], owns="gru"),
        "LSTM": Op("lstm", lambda net, x: net.lstm(x)[0], owns="lstm"),
    }  # fmt: skip


OPS = _ops()


class Net(nn.Module):
    """Runs a graph; it has the parameters of all ops that have some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 1)
        self.norm = nn.LayerNorm(4)
        self.gru, self.lstm = nn.GRU(4, 4), nn.LSTM(4, 4)
        self.weight = nn.Parameter(torch.rand(4, 4) - 0.5)

    def forward(self, graph: list[tuple[str, tuple[int, ...]]], inputs: list[Tensor], call: Call) -> list[Tensor]:
        values = [*inputs, self.weight]
        for name, places in graph:
            op = OPS[name]
            values.append(call(op, self, [values[place % len(values)] for place in places[: op.arity]]))
        return values[len(inputs) + 1 :]


def directly(op: Op, net: nn.Module, values: list[Tensor]) -> Tensor:
    result: Tensor = op.run(net, *values)
    return result


def by_list(table: CastTable, half: torch.dtype) -> Call:
    """Return what casts the arguments of an op by hand, and calls plain torch."""

    def call(op: Op, net: nn.Module, values: list[Tensor]) -> Tensor:
        owned = {name: p for name, p in net.named_parameters() if op.owns and name.startswith(op.owns)}
        rule = table.policy_of(op.target)
        policy = CastPolicy.NONE if rule is None else rule.policy
        dtypes = {value.dtype for value in [*values, *owned.values()]}
        if policy is CastPolicy.NONE or (policy is CastPolicy.PROMOTE and len(dtypes) == 1):
            return directly(op, net, values)
        to = half if policy is CastPolicy.FP16 else FP32
        # By this way too an op of the list's set runs on a module, whose parameters are cast for this call.
        cast = {name: p.to(to) for name, p in owned.items()}
        values = [value.to(to) for value in values]
        return torch.func.functional_call(_Calling(net, op), {f"net.{name}": p for name, p in cast.items()}, (values,))

    return call


class _Calling(nn.Module):
    def __init__(self, net: nn.Module, op: Op) -> None:
        super().__init__()
        self.net, self.op = net, op

    def forward(self, values: list[Tensor]) -> Tensor:
        return directly(self.op, self.net, values)


def inputs_of(kinds: tuple[bool, ...], half: torch.dtype) -> list[Tensor]:
    """Return values, in half precision or fp32."""
    numbers = torch.Generator().manual_seed(2)
    values = [torch.rand(4, 4, generator=numbers) * 2 - 1 for _ in kinds]
    return [value.to(half if kind else FP32).requires_grad_() for kind, value in zip(kinds, values, strict=True)]


Found = tuple[list[Tensor], list[Tensor | None]]


def run(graph: Any, kinds: tuple[bool, ...], half: torch.dtype, call: Call, around: Any) -> Found:
    """Run a graph within a context, and its backward pass after that.

    Returns the values and the gradients of inputs and parameters.
    """
    net, inputs = Net(), inputs_of(kinds, half)
    with around:
        values = net(graph, inputs, call)
    loss = sum((value.float() * (place + 1)).sum() for place, value in enumerate(values))
    leaves = [*inputs, *net.parameters()]
    return values, list(torch.autograd.grad(loss, leaves, allow_unused=True))  # type: ignore[arg-type]


def compare(found: Found, expected: Found, half: torch.dtype) -> None:
    for place, (ours, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        assert ours.dtype is theirs.dtype, f"value {place} is {ours.dtype}, expected {theirs.dtype}"
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=0, equal_nan=True, msg=lambda text, place=place: f"value {place}: {text}"
        )
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None and theirs is not None and theirs.isfinite().all():
            assert ours.dtype is theirs.dtype
            # A weight that is cast once for several uses adds up its gradients in half precision.
            bound = float(theirs.abs().max()) * (2.0**-5 if half is BF16 else 2.0**-8) + 1e-6
            torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


@contextlib.contextmanager
def casts(half: torch.dtype) -> Iterator[autoamp.Handle]:
    """Cast by the lists of a half dtype."""
    handle = autoamp.init(dtype=half, device_type="cpu", lists=[])
    try:
        yield handle
    finally:
        handle.deactivate()


@functools.cache
def table_of(half: torch.dtype) -> CastTable:
    with casts(half) as handle:
        return handle.settings.table


PLACES = st.tuples(*[st.integers(0, 9)] * 3)
GRAPHS = st.lists(st.tuples(st.sampled_from(list(OPS)), PLACES), min_size=1, max_size=8)
KINDS = st.tuples(st.booleans(), st.booleans())


@pytest.mark.filterwarnings("ignore")
@MANY
@given(graph=GRAPHS, kinds=KINDS, half=st.sampled_from([FP16, BF16]))
def test_graphs_are_cast_as_the_list_says(graph: Any, kinds: tuple[bool, ...], half: torch.dtype) -> None:
    expected = run(graph, kinds, half, by_list(table_of(half), half), contextlib.nullcontext())
    compare(run(graph, kinds, half, directly, casts(half)), expected, half)
