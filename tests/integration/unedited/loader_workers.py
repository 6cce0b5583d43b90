"""A data set of numpy arrays behind a DataLoader with workers and pinned memory."""

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __init__(self, count, transform=None):
        rng = np.random.RandomState(0)
        self.frequency = rng.randint(1, 4, count)
        self.noise = rng.randn(count, 32).astype(np.float32) * 0.2
        self.transform = transform

    def __len__(self):
        return len(self.frequency)

    def __getitem__(self, index):
        wave = np.sin(np.linspace(0, 2 * np.pi, 32, dtype=np.float32) * self.frequency[index]) + self.noise[index]
        sample = torch.from_numpy(wave.astype(np.float32))
        return {"wave": self.transform(sample) if self.transform else sample, "label": int(self.frequency[index]) - 1}


def normalize(sample):
    kernel = torch.ones(1, 1, 3) / 3
    smooth = torch.nn.functional.conv1d(sample.view(1, 1, -1), kernel, padding=1).view(-1)
    return (smooth - smooth.mean()) / smooth.std()


def main():
    torch.manual_seed(0)
    data = Waves(384, normalize)
    loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True)
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 32)),
        torch.nn.Conv1d(1, 8, 5),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool1d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(32, 3),
    )
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    for epoch in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch["wave"]), batch["label"])
            loss.backward()
            optimizer.step()
    model.eval()
    results = []
    with torch.no_grad():
        for batch in loader:
            assert batch["wave"].dtype == torch.float32
            results.append((model(batch["wave"]).argmax(1) == batch["label"]).numpy())
    print("accuracy", np.concatenate(results).mean())


if __name__ == "__main__":
    main()
