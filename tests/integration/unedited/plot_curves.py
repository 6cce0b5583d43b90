"""A fit that is plotted with matplotlib: curves, weights as an image, a histogram."""

import io

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

torch.manual_seed(0)
x = torch.linspace(-3, 3, 200).unsqueeze(1)
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
losses = []
for _ in range(150):
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())

fig, axes = plt.subplots(1, 3, figsize=(6, 2), dpi=40)
axes[0].plot(x, y, ".")
(line,) = axes[0].plot(x.numpy(), model(x).detach().numpy())
axes[1].imshow(model[0].weight.detach().view(8, 4))
axes[1].plot(torch.stack(losses))
axes[2].hist((model(x) - y).detach().flatten(), bins=10)
picture = io.BytesIO()
fig.savefig(picture, format="png")
print("png", picture.getvalue()[1:4])
print("loss", losses[-1].item())
print("curve", line.get_ydata().dtype, float(abs(line.get_ydata()).mean()))
