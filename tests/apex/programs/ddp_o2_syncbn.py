"""apex/examples/imagenet/main_amp.py in small: O2, SyncBatchNorm, apex DDP, one process."""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.nn as nn
from apex import amp, optimizers
from apex.fp16_utils import *
from apex.multi_tensor_apply import multi_tensor_applier
from apex.parallel import DistributedDataParallel as DDP
import apex


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", default=0, type=int)
    parser.add_argument("--sync_bn", action="store_true", default=True)
    parser.add_argument("--opt-level", type=str, default="O2")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(args.local_rank)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]), RANK="0", WORLD_SIZE="1")
    dist.init_process_group(backend="gloo", init_method="env://")

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(32, 4),
    )
    if args.sync_bn:
        print("using apex synced BN")
        model = apex.parallel.convert_syncbn_model(model)
    assert isinstance(model[1], apex.parallel.SyncBatchNorm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=args.opt_level, keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss()

    target = torch.randint(0, 4, (32,))
    input = torch.randn(32, 3, 8, 8) + target.float().view(-1, 1, 1, 1)
    losses = []
    model.train()
    for i in range(25):
        output = model(input)
        assert output.dtype == torch.float32
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 2.0)
        optimizer.step()
        losses.append(to_python_float(loss.data))
    assert model.module[0].weight.dtype != torch.float32
    assert model.module[1].weight.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in amp.master_params(optimizer))
    assert all(v.dtype == torch.float32 for v in model.module.state_dict().values() if v.is_floating_point())
    assert multi_tensor_applier.available and hasattr(optimizers, "FusedAdam")
    dist.destroy_process_group()
    print("loss {:.4f} -> {:.4f}".format(losses[0], losses[-1]))
    assert losses[-1] < 0.5 * losses[0]


if __name__ == "__main__":
    main()
