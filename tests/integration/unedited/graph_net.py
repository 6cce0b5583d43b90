"""A graph network without a library: messages are added up by index_add_ and scatter_ within the module."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Conv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.message = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x, edges):
        source, target = edges
        messages = self.message(x)[source]
        summed = torch.zeros(x.size(0), messages.size(1)).index_add_(0, target, messages)
        highest = torch.zeros(x.size(0), messages.size(1)).scatter_reduce_(
            0, target.unsqueeze(1).expand_as(messages), messages, "amax", include_self=True
        )
        degree = torch.zeros(x.size(0)).index_add_(0, target, torch.ones(len(target))).clamp(min=1)
        total = torch.zeros_like(summed).scatter_add(0, target.unsqueeze(1).expand_as(messages), messages)
        return self.own(x) + (summed + total) / (2 * degree.unsqueeze(1)) + 0.1 * highest


class GNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = Conv(8, 16), Conv(16, 2)

    def forward(self, x, edges):
        return self.conv2(F.dropout(F.relu(self.conv1(x, edges)), 0.1, self.training), edges)


torch.manual_seed(0)
labels = torch.arange(120) % 2
x = torch.randn(120, 8) + labels.unsqueeze(1) * 0.5
source, target = torch.randint(120, (2, 900))
alike = labels[source] == labels[target]
edges = torch.stack([source[alike], target[alike]])
train = torch.rand(120) < 0.4
model = GNN()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=5e-4)
for epoch in range(60):
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, edges)[train], labels[train])
    loss.backward()
    optimizer.step()
model.eval()
out = model(x, edges)
print("accuracy", (out.argmax(1)[~train] == labels[~train]).float().mean().item())
print("loss", bool(loss < 0.3), out.dtype)
