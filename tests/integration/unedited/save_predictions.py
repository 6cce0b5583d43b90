"""Predictions are saved by torch.save, json.dump and numpy.savez, and read again."""

import io
import json

import numpy as np
import torch
from sklearn.datasets import load_wine

torch.manual_seed(0)
X, y = load_wine(return_X_y=True)
X = torch.from_numpy((X - X.mean(0)) / X.std(0)).to(torch.float32)
y = torch.from_numpy(y)
net = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
log = []
for epoch in range(25):
    opt.zero_grad()
    logits = net(X)
    loss = torch.nn.functional.cross_entropy(logits, y)
    loss.backward()
    opt.step()
    log.append({"epoch": epoch, "loss": loss.item(), "first": logits[0].tolist()})

with torch.no_grad():
    predictions = net(X)
file = io.BytesIO()
torch.save({"predictions": predictions, "model": net.state_dict(), "optimizer": opt.state_dict()}, file)
print("bytes", file.tell())
file.seek(0)
again = torch.load(file)["predictions"]
text = json.dumps({"history": log, "predictions": predictions.softmax(1).tolist()})
archive = io.BytesIO()
np.savez(archive, predictions=predictions.numpy(), labels=y.numpy())
archive.seek(0)
array = np.load(archive)["predictions"]
round_trip = torch.from_numpy(array)
print("same", torch.equal(again, predictions), torch.equal(round_trip, predictions), array.dtype)
print("shared", np.shares_memory(predictions.numpy(), predictions.numpy()))
print("accuracy", (round_trip.argmax(1) == y).float().mean().item())
print("history", json.loads(text)["history"][-1]["loss"])
print("sum of probabilities", sum(json.loads(text)["predictions"][0]))
