"""Gradient accumulation as the Apex documentation has it: delay_unscale on every iteration but the last."""

import sys

import torch
from apex import amp


def gradients(opt_level, delayed):
    torch.manual_seed(11)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=128.0, verbosity=0)
    x = torch.randn(32, 6)
    y = x.sum(1, keepdim=True)
    iters_to_accumulate, losses = 4, []
    for step in range(1, 121):
        i = (step - 1) % iters_to_accumulate
        part = slice(8 * i, 8 * i + 8)
        loss = ((model(x[part]).float() - y[part]) ** 2).mean() / iters_to_accumulate
        if step % iters_to_accumulate == 0:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            with amp.scale_loss(loss, optimizer, delay_unscale=delayed) as scaled_loss:
                scaled_loss.backward()
        losses.append(loss.item())
    return losses


for opt_level in sys.argv[1:] or ["O1", "O2"]:
    late, each = gradients(opt_level, True), gradients(opt_level, False)
    print("{}: {:.4f} -> {:.4f}".format(opt_level, sum(late[:4]), sum(late[-4:])))
    assert sum(late[-4:]) < 0.2 * sum(late[:4])
    # Unscaled each time or once at the end: the same numbers, but for rounding.
    assert abs(sum(late[-4:]) - sum(each[-4:])) < 0.05 * sum(each[:4])
