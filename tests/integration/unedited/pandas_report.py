"""Predictions in a pandas DataFrame: merged, grouped, described."""

import pandas as pd
import torch
from sklearn.datasets import load_iris

torch.manual_seed(0)
frame = load_iris(as_frame=True).frame
features = [column for column in frame.columns if column != "target"]
X = torch.tensor(frame[features].values, dtype=torch.float32)
X = (X - X.mean(0)) / X.std(0)
y = torch.tensor(frame["target"].values)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
rows = []
for epoch in range(50):
    optimizer.zero_grad()
    output = model(X)
    loss = torch.nn.CrossEntropyLoss()(output, y)
    loss.backward()
    optimizer.step()
    rows.append({"epoch": epoch, "loss": float(loss), "accuracy": float((output.argmax(1) == y).float().mean())})

history = pd.DataFrame(rows).set_index("epoch")
with torch.no_grad():
    logits = model(X)
    scores = pd.DataFrame(logits.softmax(-1).numpy(), columns=["p0", "p1", "p2"])
frame = frame.join(scores)
frame["logit"] = logits.max(1).values.tolist()
frame["predicted"] = scores.values.argmax(1)
frame["right"] = frame["predicted"] == frame["target"]
print("loss", history["loss"].rolling(5).mean().iloc[-1])
print("accuracy", frame["right"].mean())
print("by class", frame.groupby("target")["right"].mean().min())
print("surest", frame.nlargest(5, "p0")["target"].max(), str(scores.dtypes.iloc[0]))
