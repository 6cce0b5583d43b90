"""Features that a forward hook takes out of a model go to numpy, k-means and a nearest-mean classifier."""

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.metrics import normalized_mutual_info_score

torch.manual_seed(0)
X, y = load_digits(n_class=4, return_X_y=True)
X, y = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(30):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(X), y).backward()
    optimizer.step()

activations, arrays = {}, []
model[1].register_forward_hook(lambda module, args, output: activations.update(relu=output.detach()))
model[0].register_forward_hook(lambda module, args, output: arrays.append(output.detach().cpu().numpy()))
with torch.no_grad():
    model(X)
features = activations["relu"].cpu().numpy()
gram = np.cov(features, rowvar=False)
reduced = PCA(4, random_state=0).fit_transform(features)
clusters = KMeans(4, n_init=3, random_state=0).fit_predict(reduced)
means = torch.stack([activations["relu"][y == label].mean(0) for label in range(4)])
nearest = torch.cdist(activations["relu"], means).argmin(1)
bank = torch.zeros(len(X), 32)
bank[:] = activations["relu"]
print("mutual information", normalized_mutual_info_score(y.numpy(), clusters))
print("nearest mean", (nearest == y).float().mean().item())
print("variance", np.trace(gram))
print("before", float(np.abs(arrays[0]).mean()), bank.mean().item())
