"""Save and resume at O2: model, optimizer and amp, as the Apex documentation has it. The resumed run is the same run."""

import os
import tempfile

import torch
import torch.nn as nn
from apex import amp


def build():
    torch.manual_seed(37)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return amp.initialize(model, optimizer, opt_level="O2", verbosity=0)


def train(model, optimizer, first, last):
    torch.manual_seed(41)
    x = torch.randn(64, 6)
    y = (x.sum(1) > 0).long()
    losses = []
    for step in range(first, last):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


model, optimizer = build()
whole = train(model, optimizer, 0, 40)

model, optimizer = build()
first = train(model, optimizer, 0, 20)
path = os.path.join(tempfile.mkdtemp(), "amp_checkpoint.pt")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, path)

model, optimizer = build()
checkpoint = torch.load(path)
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
amp.load_state_dict(checkpoint["amp"])
assert amp.state_dict()["loss_scaler0"]["unskipped"] == checkpoint["amp"]["loss_scaler0"]["unskipped"]
second = train(model, optimizer, 20, 40)
os.remove(path)
os.rmdir(os.path.dirname(path))

print("loss {:.4f} -> {:.4f}".format(whole[0], whole[-1]))
assert first + second == whole, "the resumed run is another one"
assert whole[-1] < 0.5 * whole[0]

# A fp32 model takes the checkpoint as it is.
plain = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 2))
plain.load_state_dict(checkpoint["model"])
assert all(v.dtype == torch.float32 for v in checkpoint["model"].values() if v.is_floating_point())
