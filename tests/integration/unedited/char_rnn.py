"""A character model with a recurrent state that is carried from batch to batch, and a text that is sampled."""

import math

import torch
import torch.nn as nn

text = "the quick brown fox jumps over the lazy dog. " * 60
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])


class CharRNN(nn.Module):
    def __init__(self, vocab, size):
        super().__init__()
        self.embed = nn.Embedding(vocab, size)
        self.rnn = nn.GRU(size, size, batch_first=True)
        self.head = nn.Linear(size, vocab)

    def forward(self, x, h):
        out, h = self.rnn(self.embed(x), h)
        return self.head(out), h

    def init_hidden(self, batch):
        return next(self.parameters()).new_zeros(1, batch, 48)


def detach(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(detach(v) for v in h)


torch.manual_seed(0)
batch, bptt = 10, 27
stream = data[: len(data) // batch * batch].view(batch, -1)
model = CharRNN(len(chars), 48)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(6):
    hidden = model.init_hidden(batch)
    for i in range(0, stream.size(1) - 1 - bptt, bptt):
        hidden = detach(hidden)
        logits, hidden = model(stream[:, i : i + bptt], hidden)
        loss = nn.functional.cross_entropy(logits.reshape(-1, len(chars)), stream[:, i + 1 : i + 1 + bptt].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

model.eval()
with torch.no_grad():
    idx, h, said = torch.tensor([[stoi["t"]]]), model.init_hidden(1), []
    for _ in range(12):
        logits, h = model(idx, h)
        probs = torch.softmax(logits[:, -1] / 0.2, dim=-1)
        idx = torch.multinomial(probs, 1)
        said.append(chars[idx.item()])
print("perplexity", math.exp(loss.item()))
print("known", all(c in stoi for c in said), hidden.dtype, probs.sum().item())
