"""Small models as programs for fp32 write them: ``forward`` makes masks, states and random tensors in fp32.

Each is a function that makes a model and its inputs. The output is an fp32 tensor at every level, whose mean of squares
is the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, T, B = 16, 8, 4

PROGRAMS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {}
"""By name, what makes a model and its inputs."""


class Model(nn.Module):
    """A model with layers in a dict, and a forward that is a function of it."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            elif isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                self.add_module(name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def program(make: Callable[[], tuple[dict[str, Any], tuple[Any, ...]]]) -> Callable[..., Any]:
    """Return a decorator for a forward: ``make`` gives the parts of its model, and the inputs."""

    def decorate(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def build() -> tuple[nn.Module, tuple[Any, ...]]:
            torch.manual_seed(0)
            parts, inputs = make()
            return Model(forward, **parts), inputs

        PROGRAMS[forward.__name__] = build
        return forward

    return decorate


def linear(out: int = D) -> nn.Linear:
    return nn.Linear(D, out)


def tokens() -> tuple[Tensor]:
    return (torch.randint(0, 32, (B, T)),)


def features(*shape: int) -> tuple[Tensor]:
    return (torch.randn(shape or (B, T, D)),)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias).softmax(-1) @ v


def causal() -> Tensor:
    return torch.full((T, T), float("-inf")).triu(1)


# -- language models --


@program(lambda: ({"emb": nn.Embedding(32, D), "qkv": linear(3 * D), "o": linear(), "norm": nn.LayerNorm(D)}, tokens()))
def alibi(net: Any, ids: Tensor) -> Tensor:
    x = net.emb(ids)
    q, k, v = net.qkv(x).chunk(3, -1)
    distance = torch.arange(T)[None] - torch.arange(T)[:, None]
    x = net.norm(x + net.o(attend(q, k, v, 0.25 * distance + causal())))
    return F.linear(x, net.emb.weight)


@program(lambda: ({"emb": nn.Embedding(32, D), "qkv": linear(3 * D), "o": linear(), "norm": nn.RMSNorm(D)}, tokens()))
def llama_complex_rope(net: Any, ids: Tensor) -> Tensor:
    x = net.emb(ids)
    angles = torch.outer(torch.arange(T).float(), 1.0 / 10000 ** (torch.arange(0, D, 2).float() / D))
    rotation = torch.polar(torch.ones_like(angles), angles)

    def rotate(one: Tensor) -> Tensor:
        pairs = torch.view_as_complex(one.float().reshape(B, T, -1, 2))
        return torch.view_as_real(pairs * rotation).flatten(2)

    q, k, v = net.qkv(net.norm(x)).chunk(3, -1)
    x = x + net.o(F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True))
    return F.linear(net.norm(x), net.emb.weight)


@program(lambda: ({"emb": nn.Embedding(32, D), "qkv": linear(3 * D), "o": linear()}, tokens()))
def rope_by_halves(net: Any, ids: Tensor) -> Tensor:
    x = net.emb(ids)
    angles = torch.outer(torch.arange(T).float(), 1.0 / 10000 ** (torch.arange(0, D, 2).float() / D)).repeat(1, 2)

    def rotate(one: Tensor) -> Tensor:
        left, right = one.chunk(2, -1)
        return one * angles.cos() + torch.cat((-right, left), -1) * angles.sin()

    q, k, v = net.qkv(x).chunk(3, -1)
    return net.o(F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True))  # type: ignore[no-any-return]


@program(lambda: ({"emb": nn.Embedding(32, D), "qkv": linear(3 * D), "rel": nn.Embedding(2 * T, 1)}, tokens()))
def t5_relative_bias(net: Any, ids: Tensor) -> Tensor:
    x = net.emb(ids)
    places = torch.arange(T)[None] - torch.arange(T)[:, None] + T
    # T5 takes the softmax in fp32, and casts it back by `type_as` of the scores.
    q, k, v = net.qkv(x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).chunk(3, -1)
    scores = q @ k.transpose(-1, -2) + net.rel(places)[..., 0] + torch.zeros(B, 1, T)
    return x + scores.float().softmax(-1) @ v


@program(lambda: ({"qkv": linear(3 * D), "o": linear()}, features()))
def key_cache_in_fp32(net: Any, x: Tensor) -> Tensor:
    keys, values, outputs = torch.zeros(B, T, D), torch.zeros(B, T, D), []
    for place in range(T):
        q, k, v = net.qkv(x[:, place : place + 1]).chunk(3, -1)
        keys = keys.index_copy(1, torch.tensor([place]), k)
        values = values.index_copy(1, torch.tensor([place]), v)
        outputs.append(attend(q, keys[:, : place + 1], values[:, : place + 1], torch.zeros(1)))
    return net.o(torch.cat(outputs, 1))  # type: ignore[no-any-return]


@program(lambda: ({"mha": nn.MultiheadAttention(D, 2, batch_first=True)}, features()))
def multihead_attention_with_fp32_mask(net: Any, x: Tensor) -> Tensor:
    return net.mha(x, x * torch.ones(T, 1), x, attn_mask=causal())[0]  # type: ignore[no-any-return]


@program(
    lambda: ({"router": linear(3), "experts": nn.ModuleList([linear() for _ in range(3)]), "out": linear()}, features())
)
def mixture_of_experts(net: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, D)
    weights, chosen = net.router(flat).softmax(-1, dtype=torch.float32).topk(2)
    out = torch.zeros(flat.shape)
    for number, expert in enumerate(net.experts):
        rows, place = (chosen == number).nonzero(as_tuple=True)
        out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
    return net.out(out)  # type: ignore[no-any-return]


@program(lambda: ({"a": linear(), "b": linear(), "c": linear()}, features()))
def state_space_scan(net: Any, x: Tensor) -> Tensor:
    state, outputs = torch.zeros(B, D), []
    decay, update = torch.sigmoid(net.a(x)), net.b(x)
    for place in range(T):
        state = state * decay[:, place] + update[:, place]
        outputs.append(net.c(state))
    return torch.stack(outputs, 1)


# -- recurrent layers --


@program(lambda: ({"rnn": nn.LSTM(D, D, 2, batch_first=True), "out": linear()}, features()))
def lstm_with_fp32_states(net: Any, x: Tensor) -> Tensor:
    states = torch.zeros(2, B, D), torch.zeros(2, B, D)
    return net.out(net.rnn(x, states)[0])  # type: ignore[no-any-return]


@program(lambda: ({"rnn": nn.GRU(D, D, batch_first=True, bidirectional=True), "first": linear()}, features()))
def gru_of_a_widened_input(net: Any, x: Tensor) -> Tensor:
    return net.rnn(net.first(x) + torch.linspace(0, 1, T)[:, None])[0]  # type: ignore[no-any-return]


@program(lambda: ({"cell": nn.LSTMCell(D, D), "other": nn.GRUCell(D, D)}, features()))
def cells_with_fp32_states(net: Any, x: Tensor) -> Tensor:
    h, c, g = torch.zeros(B, D), torch.zeros(B, D), torch.zeros(B, D)
    for place in range(T):
        h, c = net.cell(x[:, place], (h, c))
        g = net.other(h, g)
    return g


@program(lambda: ({"rnn": nn.GRU(D, D, batch_first=True), "out": linear()}, features()))
def packed_sequence(net: Any, x: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x * torch.ones(T, 1), torch.tensor([8, 6, 5, 2]), batch_first=True)
    return net.out(nn.utils.rnn.pad_packed_sequence(net.rnn(packed)[0], batch_first=True)[0])  # type: ignore[no-any-return]


# -- images and signals --


@program(lambda: ({"dw": nn.Conv2d(4, 4, 3, padding=1, groups=4), "out": nn.Conv2d(4, 2, 1)}, features(B, 4, 8, 8)))
def stochastic_depth(net: Any, x: Tensor) -> Tensor:
    keep = torch.empty(x.shape[0], 1, 1, 1).bernoulli_(0.9) / 0.9
    return net.out(x + net.dw(x) * keep)  # type: ignore[no-any-return]


@program(
    lambda: (
        {"conv": nn.Conv2d(4, 4, 3, padding=1), "up": nn.ConvTranspose2d(6, 4, 2, 2), "bn": nn.BatchNorm2d(4)},
        features(B, 4, 8, 8),
    )
)
def coordinates_in_convolutions(net: Any, x: Tensor) -> Tensor:
    axis = torch.linspace(-1, 1, 8)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij")).expand(B, -1, -1, -1)
    x = torch.cat((F.relu(net.bn(net.conv(x))), grid), 1)
    return net.bn(net.up(x))  # type: ignore[no-any-return]


@program(lambda: ({"flow": nn.Conv2d(4, 2, 3, padding=1), "out": nn.Conv2d(4, 2, 1)}, features(B, 4, 8, 8)))
def warp(net: Any, x: Tensor) -> Tensor:
    axis = torch.linspace(-1, 1, 8)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    grid = grid + 0.1 * net.flow(x).permute(0, 2, 3, 1)
    return net.out(F.grid_sample(x, grid, align_corners=False))  # type: ignore[no-any-return]


@program(lambda: ({"mix": linear(), "w": nn.Parameter(torch.ones(T // 2 + 1, D)), "out": linear()}, features()))
def fft_block(net: Any, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(net.mix(x), dim=1) * net.w
    return net.out(x + torch.fft.irfft(spectrum, n=T, dim=1))  # type: ignore[no-any-return]


@program(lambda: ({"mix": nn.Linear(33, D), "out": linear()}, features(B, 128)))
def spectrogram(net: Any, x: Tensor) -> Tensor:
    power = torch.stft(x, 64, window=torch.hann_window(64), return_complex=True).abs().pow(2)
    return net.out(net.mix(torch.log1p(power).transpose(1, 2)))  # type: ignore[no-any-return]


# -- graphs, boxes, sets --


@program(lambda: ({"layer": linear(), "score": linear(1), "out": linear()}, features(B * T, D)))
def graph_attention(net: Any, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    source, target = torch.randint(len(x), (2, 96))
    z = net.layer(x)
    e = F.leaky_relu(net.score(z)[source, 0] + net.score(z)[target, 0], 0.2)
    most = torch.full((len(x),), -math.inf).scatter_reduce(0, target, e, "amax")
    w = (e - most[target]).exp()
    w = w / (torch.zeros(len(x)).index_add(0, target, w)[target] + 1e-9)
    out = torch.zeros_like(z)
    out.index_add_(0, target, z[source] * w[:, None])
    return net.out(torch.zeros(len(x), D).scatter_add(0, target[:, None].expand(-1, D), out[target]))  # type: ignore[no-any-return]


@program(lambda: ({"head": linear(4), "out": nn.Linear(4, 4)}, features(B * T, D)))
def detector_targets(net: Any, x: Tensor) -> Tensor:
    boxes, scores = net.head(x).sigmoid(), torch.linspace(0, 1, len(x))
    chosen = scores.topk(8).indices
    targets = torch.zeros(len(x), 4)
    targets[chosen] = boxes[chosen].detach()
    best = torch.zeros(len(x), 4).masked_scatter(targets > 0.5, boxes)
    limit = torch.quantile(boxes, 0.9)
    return net.out(best + torch.where(boxes > limit, limit, boxes)) - targets  # type: ignore[no-any-return]


@program(lambda: ({"adjacency": torch.eye(B * T).roll(1, 0), "layer": linear()}, features(B * T, D)))
def sparse_neighbors(net: Any, x: Tensor) -> Tensor:
    neighbors = (torch.eye(B * T) + torch.eye(B * T).roll(1, 0)).to_sparse()
    return net.layer(neighbors @ x)  # type: ignore[no-any-return]


@program(lambda: ({"layer": linear(), "query": nn.Parameter(torch.randn(3, D))}, features()))
def slots_by_einsum(net: Any, x: Tensor) -> Tensor:
    weights = torch.einsum("bld,sd->bsl", net.layer(x).float(), net.query).softmax(-1)
    return torch.einsum("bsl,bld->bsd", weights, net.layer(x))


# -- linear algebra and densities --


@program(lambda: ({"w": nn.Parameter(torch.linalg.qr(torch.randn(D, D))[0]), "n": linear(2 * D)}, features(B * T, D)))
def flow_with_slogdet(net: Any, x: Tensor) -> Tensor:
    base = torch.distributions.MultivariateNormal(torch.zeros(D), torch.eye(D))
    z, logdet = x @ net.w, torch.linalg.slogdet(net.w)[1]
    scale, shift = net.n(z).chunk(2, -1)
    scale = torch.tanh(scale)
    return base.log_prob(z * scale.exp() + shift) + scale.sum(-1) + logdet  # type: ignore[no-any-return]


@program(lambda: ({"w": nn.Parameter(0.1 * torch.randn(D, D)), "out": linear()}, features()))
def orthogonal_by_matrix_exp(net: Any, x: Tensor) -> Tensor:
    return net.out(x @ torch.matrix_exp(net.w - net.w.T))  # type: ignore[no-any-return]


@program(lambda: ({"first": linear(), "out": linear()}, features(B * T, D)))
def whitening(net: Any, x: Tensor) -> Tensor:
    x = net.first(x)
    factor = torch.linalg.cholesky(x.T @ x / len(x) + 0.1 * torch.eye(D))
    return net.out(torch.linalg.solve_triangular(factor, x.T, upper=False).T)  # type: ignore[no-any-return]


@program(
    lambda: ({"first": linear(), "norm": nn.GroupNorm(2, D), "last": nn.LayerNorm(D), "p": nn.PReLU()}, features())
)
def norms_of_a_widened_input(net: Any, x: Tensor) -> Tensor:
    x = net.p(net.first(x) + torch.linspace(0, 1, D))
    x = net.norm(x.transpose(1, 2)).transpose(1, 2) + torch.ones(D)
    return net.last(x.float())  # type: ignore[no-any-return]


# -- whole models, small --


@program(
    lambda: (
        {
            "emb": nn.Embedding(32, D), "norm": nn.RMSNorm(D), "qkv": linear(3 * D), "o": linear(),
            "up": linear(2 * D), "down": nn.Linear(2 * D, D), "slopes": torch.tensor([0.25, 0.0625]),
        },
        tokens(),
    )
)  # fmt: skip
def language_model_with_alibi(net: Any, ids: Tensor) -> Tensor:
    x = net.emb(ids)
    q, k, v = net.qkv(net.norm(x)).view(B, T, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
    keys, values = torch.zeros(B, 2, 2 * T, D // 2), torch.zeros(B, 2, 2 * T, D // 2)
    keys[:, :, :T], values[:, :, :T] = k, v
    places = torch.arange(T)[None] - torch.arange(T)[:, None]
    bias = (net.slopes[:, None, None] * places).masked_fill(places > 0, -math.inf)
    x = x + net.o(attend(q, keys[:, :, :T], values[:, :, :T], bias).transpose(1, 2).reshape(B, T, D))
    x = x + net.down(F.silu(net.up(net.norm(x))))
    return F.linear(net.norm(x), net.emb.weight)


@program(
    lambda: (
        {
            "stem": nn.Conv2d(1, D, 2, 2), "dw": nn.Conv2d(D, D, 7, padding=3, groups=D), "norm": nn.LayerNorm(D),
            "a": linear(4 * D), "b": nn.Linear(4 * D, D), "gamma": nn.Parameter(0.1 * torch.ones(D)), "head": linear(4),
        },
        features(B, 1, 8, 8),
    )
)  # fmt: skip
def convnext(net: Any, x: Tensor) -> Tensor:
    x = net.norm(net.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    for _ in range(2):
        y = net.b(F.gelu(net.a(net.norm(net.dw(x).permute(0, 2, 3, 1))))) * net.gamma
        x = x + y.permute(0, 3, 1, 2) * (torch.empty(B, 1, 1, 1).bernoulli_(0.9) / 0.9)
    return net.head(net.norm(x.mean((2, 3))))  # type: ignore[no-any-return]


@program(
    lambda: (
        {
            "layers": nn.ModuleList(linear() for _ in range(2)), "bn": nn.BatchNorm1d(D), "out": linear(4),
            "scores": nn.Parameter(0.1 * torch.randn(2, 2, D // 2)),
        },
        features(B * T, D),
    )
)  # fmt: skip
def graph_attention_net(net: Any, x: Tensor) -> Tensor:
    source, target = torch.arange(96) * 7 % len(x), torch.arange(96) * 5 % len(x)
    for layer in net.layers:
        z = layer(x).view(len(x), 2, -1)
        e = (z * net.scores[0]).sum(-1)[source] + (z * net.scores[1]).sum(-1)[target]
        e, places = F.leaky_relu(e, 0.2), target[:, None].expand(-1, 2)
        most = torch.full((len(x), 2), -math.inf).scatter_reduce(0, places, e, "amax", include_self=True)
        w = (e - most[target]).exp()
        w = w / (torch.zeros(len(x), 2).index_add(0, target, w)[target] + 1e-9)
        x = torch.zeros_like(z).index_add_(0, target, z[source] * w[..., None]).flatten(1)
        x = F.elu(net.bn(x))
    return net.out(x)  # type: ignore[no-any-return]


@program(
    lambda: (
        {
            "rotations": nn.ParameterList(torch.linalg.qr(torch.randn(D, D))[0] for _ in range(2)),
            "nets": nn.ModuleList(nn.Sequential(nn.Linear(D // 2, D), nn.ReLU(), linear()) for _ in range(2)),
        },
        features(B * T, D),
    )
)  # fmt: skip
def normalizing_flow(net: Any, x: Tensor) -> Tensor:
    logdet: Any = 0
    for number, (rotation, inner) in enumerate(zip(net.rotations, net.nets, strict=True)):
        logdet = logdet + torch.linalg.slogdet(rotation)[1].expand(len(x))
        a, b = (x @ rotation).chunk(2, 1)[:: -1 if number % 2 else 1]
        scale, shift = inner(a).chunk(2, 1)
        scale = torch.tanh(scale)
        x, logdet = torch.cat([a, b * scale.exp() + shift], 1), logdet + scale.sum(1)
    base = torch.distributions.MultivariateNormal(torch.zeros(D), torch.eye(D))
    return 0.1 * (base.log_prob(x) + logdet)  # type: ignore[no-any-return]
