"""SwAV and SimCLR in PyTorch: SyncBatchNorm of apex, SGD in LARC, O1, a schedule by hand."""

import math

import apex
import torch
import torch.nn as nn
from apex.parallel.LARC import LARC


def main():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(288, 5))
    process_group = None
    model = apex.parallel.convert_syncbn_model(model, process_group=process_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9, weight_decay=1e-6)
    optimizer = LARC(optimizer=optimizer, trust_coefficient=0.1, clip=False)
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level="O1")
    labels = torch.randint(0, 5, (40,))
    images = torch.randn(40, 3, 8, 8) + labels.float().view(-1, 1, 1, 1)
    history = []
    for iteration in range(30):
        for param_group in optimizer.param_groups:
            param_group["lr"] = 0.3 * (1 + math.cos(math.pi * iteration / 30))
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert optimizer.optim.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert optimizer.optim.param_groups[0]["weight_decay"] == 1e-6
    save_dict = {"optimizer": optimizer.state_dict(), "amp": apex.amp.state_dict()}
    optimizer.load_state_dict(save_dict["optimizer"])
    apex.amp.load_state_dict(save_dict["amp"])
    print("loss {:.4f} -> {:.4f}".format(history[0], history[-1]))
    assert history[-1] < 0.5 * history[0]


if __name__ == "__main__":
    main()
