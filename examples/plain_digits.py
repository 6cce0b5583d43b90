"""Train a convnet on scikit-learn's handwritten digits. An ordinary PyTorch script: it says nothing of precision.

    python examples/plain_digits.py              in fp32
    autoamp run examples/plain_digits.py         the same script in mixed precision

The data are 1797 real images of 8 x 8 pixels that come with scikit-learn; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TEST_IMAGES = 400
PEAK_LEARNING_RATE = 1e-2


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return the images (N, 1, 8, 8) fp32 in 0..1 with their labels (N,) int64, for training and for testing."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Net(nn.Module):
    """A convnet of some 80,000 weights from images (N, 1, 8, 8) to logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.hidden = nn.Linear(64 * 4, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.norm(self.conv2(x))), 2)
        logits: Tensor = self.out(F.dropout(F.relu(self.hidden(x.flatten(1))), 0.2, self.training))
        return logits


def train(net: nn.Module, images: TensorDataset, epochs: int, device: torch.device) -> None:
    """Train a net, with clipped gradients and a one-cycle schedule."""
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(images, batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=epochs * len(loader))
    for epoch in range(1, epochs + 1):
        net.train()
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x.to(device)), y.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.4f}")


@torch.no_grad()
def accuracy(net: nn.Module, images: TensorDataset, device: torch.device) -> float:
    """Return the share of images that a net gets right, in percent."""
    net.eval()
    x, y = (tensor.to(device) for tensor in images.tensors)
    right: Tensor = net(x).argmax(1) == y
    return 100 * int(right.sum()) / len(y)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print the accuracy on images that were held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, testing = load()
    net = Net().to(device)
    train(net, training, arguments.epochs, device)
    print(f"accuracy on {TEST_IMAGES} held-out images: {accuracy(net, testing, device):.2f} %")


if __name__ == "__main__":
    main()
