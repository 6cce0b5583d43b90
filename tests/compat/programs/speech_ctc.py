"""Speech recognition of 2020: packed LSTMs and CTC under O1."""

import torch
from apex import amp
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class BatchRNN(nn.Module):
    def __init__(self, size, hidden):
        super().__init__()
        self.rnn = nn.LSTM(input_size=size, hidden_size=hidden, bidirectional=True, bias=True)
        self.num_directions = 2

    def flatten_parameters(self):
        self.rnn.flatten_parameters()

    def forward(self, x, lengths):
        x = pack_padded_sequence(x, lengths)
        x, h = self.rnn(x)
        x, _ = pad_packed_sequence(x)
        return x.view(x.size(0), x.size(1), 2, -1).sum(2)


class DeepSpeech(nn.Module):
    def __init__(self, labels):
        super().__init__()
        self.rnn = BatchRNN(8, 24)
        self.fc = nn.Linear(24, labels)

    def forward(self, x, lengths):
        return self.fc(self.rnn(x, lengths))


torch.manual_seed(13)
labels, frames = 5, 12
targets = torch.randint(1, labels, (6, 4))
codes = torch.randn(labels, 8)
inputs = torch.stack([codes[t].repeat_interleave(3, 0) for t in targets], 1) + 0.1 * torch.randn(frames, 6, 8)
input_sizes = torch.tensor([12, 12, 12, 12, 12, 12])
target_sizes = torch.full((6,), 4, dtype=torch.long)

model = DeepSpeech(labels)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic")
criterion = nn.CTCLoss(blank=0, reduction="sum", zero_infinity=True)
losses = []
for epoch in range(60):
    out = model(inputs, input_sizes)
    float_out = out.float().log_softmax(2)
    loss = criterion(float_out, targets, input_sizes, target_sizes) / 6
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 40)
    optimizer.step()
    losses.append(loss.item())
assert model.rnn.rnn.weight_hh_l0.dtype == torch.float32
assert model.rnn.rnn(inputs)[0].dtype != torch.float32
print("loss {:.4f} -> {:.4f}".format(losses[0], losses[-1]))
assert losses[-1] < 0.3 * losses[0]
