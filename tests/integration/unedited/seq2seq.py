"""An encoder and a decoder of LSTMs: outputs are written step by step into a tensor that was made beforehand."""

import random

import torch
import torch.nn as nn


class Seq2Seq(nn.Module):
    def __init__(self, vocab, size):
        super().__init__()
        self.vocab = vocab
        self.embedding = nn.Embedding(vocab, size)
        self.encoder, self.decoder = nn.LSTM(size, size), nn.LSTMCell(size, size)
        self.attn = nn.Linear(2 * size, 1)
        self.fc_out = nn.Linear(2 * size, vocab)

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        trg_len, batch = trg.shape
        outputs = torch.zeros(trg_len, batch, self.vocab)
        attentions = torch.zeros(trg_len, batch, src.size(0))
        states, (hidden, cell) = self.encoder(self.embedding(src))
        hidden, cell, token = hidden[0], cell[0], torch.zeros(batch, dtype=torch.long)
        for t in range(trg_len):
            hidden, cell = self.decoder(self.embedding(token), (hidden, cell))
            scores = self.attn(torch.cat([states, hidden.expand_as(states)], dim=2)).squeeze(2)
            weights = torch.softmax(scores.t(), dim=1)
            attentions[t] = weights
            context = torch.bmm(weights.unsqueeze(1), states.transpose(0, 1)).squeeze(1)
            outputs[t] = self.fc_out(torch.cat([hidden, context], dim=1))
            token = trg[t] if random.random() < teacher_forcing_ratio else outputs[t].argmax(1)
        return outputs, attentions


random.seed(0)
torch.manual_seed(0)
model = Seq2Seq(8, 32)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(70):
    src = torch.randint(1, 8, (5, 32))
    output, _ = model(src, src)
    loss = nn.functional.cross_entropy(output.view(-1, 8), src.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
model.eval()
with torch.no_grad():
    output, attention = model(src, src, 0)
print("learned", bool(loss < 1.2))
print("attention", attention.sum(2).mean().item(), attention.numpy().dtype, output.dtype)
