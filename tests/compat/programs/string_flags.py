"""A training script whose flags come as strings, from a shell or a YAML file, and go to amp as they are."""

import argparse
import itertools

import torch
from apex import amp
from torch import nn


def parse(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--enabled", type=str, default="True")
    parser.add_argument("--master-weights", type=str, default=None)
    return parser.parse_args(argv)


def run(argv):
    args = parse(argv)
    torch.manual_seed(47)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(
        models=model, optimizers=optimizer, enabled=args.enabled, opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32, loss_scale=args.loss_scale,
        master_weights=args.master_weights, verbosity=False,
    )
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("{:70s} {:.4f} -> {:.4f}".format(" ".join(argv), losses[0], losses[-1]))
    assert losses[-1] < 0.5 * losses[0]
    return model, args


for level, scale in itertools.product(["O0", "O1", "O2", "O3"], ["128.0", "dynamic", "1.0"]):
    run(["--opt-level", level, "--loss-scale", scale])
    if scale != "dynamic":
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == float(scale)
model, _ = run(["--opt-level", "O2", "--keep-batchnorm-fp32", "False"])
assert model[1].weight.dtype != torch.float32
model, _ = run(["--opt-level", "O3", "--keep-batchnorm-fp32", "True", "--master-weights", "True"])
assert model[1].weight.dtype == torch.float32 and model[0].weight.dtype != torch.float32
# Under O1 the flag says nothing.
run(["--opt-level", "O1", "--keep-batchnorm-fp32", "True"])
model, _ = run(["--enabled", "False", "--opt-level", "O2"])
assert model[0].weight.dtype == torch.float32

# The level in the place of `enabled`.
model = nn.Linear(3, 3)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1")
assert model(torch.ones(2, 3)).dtype != torch.float32
try:
    amp.initialize(model, opt_level="01")
    raise SystemExit("a level with a zero was taken")
except RuntimeError as e:
    assert "O0" in str(e) and "O3" in str(e)
