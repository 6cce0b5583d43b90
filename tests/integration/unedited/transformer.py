"""A small transformer written out: -1e9 in the mask, a table of positions, a warm-up schedule; it learns to reverse."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiHeadAttention(nn.Module):
    def __init__(self, heads, d_model):
        super().__init__()
        self.d_k, self.h = d_model // heads, heads
        self.q_linear, self.k_linear = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.v_linear, self.out = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, x, mask):
        bs = x.size(0)
        q = self.q_linear(x).view(bs, -1, self.h, self.d_k).transpose(1, 2)
        k = self.k_linear(x).view(bs, -1, self.h, self.d_k).transpose(1, 2)
        v = self.v_linear(x).view(bs, -1, self.h, self.d_k).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        weights = F.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, v).transpose(1, 2).contiguous().view(bs, -1, self.h * self.d_k)
        return self.out(mixed)


class Norm(nn.Module):
    def __init__(self, d_model, eps=1e-6):
        super().__init__()
        self.alpha, self.bias, self.eps = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model)), eps

    def forward(self, x):
        return self.alpha * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.bias


class PositionalEncoder(nn.Module):
    def __init__(self, d_model, longest=20):
        super().__init__()
        position = torch.arange(longest).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(longest, d_model)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x):
        return x * math.sqrt(x.size(-1)) + self.pe[:, : x.size(1)]


class Encoder(nn.Module):
    def __init__(self, vocab, d_model=32, heads=4):
        super().__init__()
        self.embed, self.pe = nn.Embedding(vocab, d_model), PositionalEncoder(d_model)
        self.norms = nn.ModuleList(Norm(d_model) for _ in range(3))
        self.attn = nn.ModuleList(MultiHeadAttention(heads, d_model) for _ in range(2))
        self.ff = nn.Sequential(nn.Linear(d_model, 64), nn.ReLU(), nn.Linear(64, d_model))
        self.final = nn.Linear(d_model, vocab)

    def forward(self, tokens, mask):
        x = self.pe(self.embed(tokens))
        x = x + self.attn[0](self.norms[0](x), mask)
        x = x + self.ff(self.norms[1](x))
        x = x + self.attn[1](self.norms[2](x), mask)
        return self.final(x)


torch.manual_seed(0)
model = Encoder(12)
for p in model.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98), eps=1e-9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1.0))
for step in range(120):
    src = torch.randint(1, 12, (32, 6))
    src[:8, 4:] = 0
    mask = (src != 0).unsqueeze(1)
    logits = model(src, mask)
    loss = F.cross_entropy(logits.view(-1, 12), src.flip(1).reshape(-1), ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
print("learned", bool(loss < 1.5))
print("loss is a number", math.isfinite(loss.item()), logits.dtype)
