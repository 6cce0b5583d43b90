"""fp16_utils in the way of early 2018: the half model, FP16_Optimizer static and dynamic, LBFGS, and masters by
hand."""

import torch
import torch.nn as nn
from apex.fp16_utils import *

N, D_in, D_out = 64, 32, 4


def batch():
    torch.manual_seed(3)
    x = torch.randn(N, D_in)
    return x, x[:, :D_out] * 0.5


def regress(network, optimizer, x, y, steps, clip=None):
    losses = []
    for t in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(x).float(), y)
        optimizer.backward(loss)
        if clip:
            norm = optimizer.clip_master_grads(clip)
            assert norm == -1 or norm >= 0
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    x, y = batch()

    network = network_to_half(nn.Linear(D_in, D_out))
    optimizer = FP16_Optimizer(torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.5), static_loss_scale=128.0)
    static = regress(network, optimizer, x, y, 20)
    assert optimizer.loss_scale == 128.0
    assert optimizer.inspect_master_grad_data() is not None

    network = FP16Model(nn.Sequential(nn.Linear(D_in, 16), nn.BatchNorm1d(16), nn.Linear(16, D_out)))
    optimizer = FP16_Optimizer(
        torch.optim.Adam(network.parameters(), lr=0.01), dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2 ** 32, "scale_window": 1000}, verbose=False,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=10)
    before = optimizer.loss_scale
    dynamic = regress(network, optimizer, x, y, 60, clip=1.0)
    assert optimizer.loss_scale < before
    scheduler.step()
    saved = optimizer.state_dict()
    for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step",
                "optimizer_state_dict", "fp32_from_fp16"):
        assert key in saved, key
    optimizer.load_state_dict(saved)

    # Closures
    network = nn.Linear(D_in, D_out).half()
    optimizer = FP16_Optimizer(torch.optim.LBFGS(network.parameters(), lr=0.5), dynamic_loss_scale=True)
    curve = []
    for t in range(3):
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(network(x.half()).float(), y)
            optimizer.backward(loss)
            curve.append(loss.item())
            return loss
        optimizer.step(closure)

    # Masters by hand
    model = convert_network(nn.Linear(D_in, D_out), torch.float16)
    model_params, master_params = prep_param_lists(model)
    sgd = torch.optim.SGD(master_params, lr=0.5)
    scaler = DynamicLossScaler(scale_window=500, init_scale=2 ** 20)
    hand = []
    for t in range(30):
        model.zero_grad()
        loss = nn.functional.mse_loss(model(x.half()).float(), y)
        scaler.backward(loss)
        overflow = scaler.has_overflow(model_params)
        scaler.update_scale(overflow)
        if overflow:
            continue
        model_grads_to_master_grads(model_params, master_params)
        for param in master_params:
            param.grad.data.mul_(1.0 / scaler.loss_scale)
        clip_grad_norm(master_params, 10.0)
        sgd.step()
        master_params_to_model_params(model_params, master_params)
        hand.append(to_python_float(loss.data))

    for name, curve in [("static", static), ("dynamic", dynamic), ("lbfgs", curve), ("hand", hand)]:
        print("{} {:.4f} -> {:.4f}".format(name, curve[0], curve[-1]))
        assert curve[-1] < 0.5 * curve[0], name


if __name__ == "__main__":
    main()
