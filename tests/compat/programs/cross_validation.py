"""A Kaggle kernel: each fold initialises amp anew, O1 then O2, with FusedAdam, a scheduler from before, and a checkpoint."""

import io

import torch
import torch.nn as nn
from apex import amp
from apex.optimizers import FusedAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau, LambdaLR

USE_APEX = True


def seed_everything(seed=1234):
    torch.manual_seed(seed)


def fold(k, opt_level, x, y):
    seed_everything()
    net = nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = FusedAdam(net.parameters(), lr=0.02)
    warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    plateau = ReduceLROnPlateau(optimizer, patience=50)
    if USE_APEX:
        net, optimizer = amp.initialize(net, optimizer, opt_level=opt_level, verbosity=0)
    train = torch.arange(len(x)) % 3 != k
    loss_fn = nn.BCEWithLogitsLoss()
    avg_loss = []
    for epoch in range(40):
        net.train()
        optimizer.zero_grad()
        y_pred = net(x[train])
        loss = loss_fn(y_pred.float(), y[train])
        if USE_APEX:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
        warmup.step()
        net.eval()
        with torch.no_grad():
            valid = net(x[~train]).float()
        plateau.step(loss_fn(valid, y[~train]))
        avg_loss.append(loss.item())
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    accuracy = ((valid > 0).float() == y[~train]).float().mean().item()
    print("fold {} {}: {:.4f} -> {:.4f}, accuracy {:.3f}".format(k, opt_level, avg_loss[0], avg_loss[-1], accuracy))
    assert avg_loss[-1] < 0.5 * avg_loss[0] and accuracy > 0.75


seed_everything()
features = torch.randn(150, 10)
labels = (features[:, :3].sum(1, keepdim=True) > 0).float()
for number, level in enumerate(["O1", "O2", "O1"]):
    fold(number, level, features, labels)
