"""NVIDIA's BERT pre-training: accumulation, one flat all-reduce of the masters' gradients, the scaler asked by hand."""

import os
import socket

import amp_C
import apex_C
import torch
from apex import amp
from apex.amp import _amp_state
from apex.optimizers import FusedLAMB
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel.distributed import flat_dist_call
from torch import nn

ACCUMULATION = 2


def setup():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]), RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group(backend="gloo", init_method="env://")


def take_optimizer_step(optimizer, model, overflow_buf, global_step):
    # manually allreduce gradients after all accumulation steps
    scaler = _amp_state.loss_scalers[0]
    master_grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    flat_grad_size = sum(p.numel() for p in master_grads)
    flat_raw = torch.empty(flat_grad_size, dtype=torch.float32)
    # combine unflattening and predivision of unscaled 'raw' gradient
    allreduced_views = apex_C.unflatten(flat_raw, master_grads)
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(
        65536, overflow_buf, [master_grads, allreduced_views],
        scaler.loss_scale() / (torch.distributed.get_world_size() * ACCUMULATION),
    )
    # sum gradient across ranks. Because of the predivision, this averages the gradient
    torch.distributed.all_reduce(flat_raw)
    # combine unscaling and unflattening of allreduced gradient
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(65536, overflow_buf, [allreduced_views, master_grads], 1.0 / scaler.loss_scale())
    # update loss scale
    scaler = _amp_state.loss_scalers[0]
    old_overflow_buf = scaler._overflow_buf
    scaler._overflow_buf = overflow_buf
    had_overflow = scaler.update_scale()
    scaler._overfloat_buf = old_overflow_buf
    # call optimizer step function
    if had_overflow == 0:
        optimizer.step()
        global_step += 1
    else:
        # Overflow detected, print message and clear gradients
        print("Gradient overflow. Skipping step, reducing loss scale to {}".format(scaler.loss_scale()))
        if _amp_state.opt_properties.master_weights:
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
    for param in model.parameters():
        param.grad = None
    return global_step


def main():
    setup()
    torch.manual_seed(43)
    model = nn.Sequential(nn.Embedding(12, 16), nn.Flatten(), nn.Linear(64, 3))
    no_decay = ["bias"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = FusedLAMB(groups, lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic",
                                      cast_model_outputs=torch.float16)
    amp._amp_state.loss_scalers[0]._loss_scale = 2 ** 30
    flat_dist_call([param.data for param in model.parameters()], torch.distributed.broadcast, (0,))
    overflow_buf = torch.zeros(1, dtype=torch.int)

    ids = torch.randint(0, 12, (60, 4))
    labels = (ids[:, 0] + ids[:, 1]) % 3
    losses, global_step, skipped = [], 0, 0
    for iteration in range(120):
        half = slice(0, 30) if iteration % 2 == 0 else slice(30, 60)
        logits = model(ids[half])
        assert logits.dtype == torch.float16
        loss = nn.functional.cross_entropy(logits.float(), labels[half])
        with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled_loss:
            scaled_loss.backward()
        losses.append(loss.item())
        if (iteration + 1) % ACCUMULATION == 0:
            before = global_step
            global_step = take_optimizer_step(optimizer, model, overflow_buf, global_step)
            skipped += before == global_step
    # 2**30 is too much at first; then it goes down and training goes on.
    assert skipped > 0 and global_step == 60 - skipped > 40, (skipped, global_step)
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0 ** (30 - skipped)

    master = list(amp.master_params(optimizer))
    checkpoint = {"optimizer": optimizer.state_dict(), "master params": [p.detach().clone() for p in master]}
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(checkpoint["optimizer"])
    for param, saved_param in zip(amp.master_params(optimizer), checkpoint["master params"]):
        param.data.copy_(saved_param.data)
    torch.distributed.destroy_process_group()
    print("loss {:.4f} -> {:.4f}, {} skipped".format(losses[0], losses[-1], skipped))
    assert losses[-1] < 0.5 * losses[0]


if __name__ == "__main__":
    main()
