"""BERT fine-tuning in the way of early 2019: apex.optimizers.FP16_Optimizer, and a checkpoint that a subclass makes of
its attributes, saved in the middle of the run and resumed."""

import io

import torch
import torch.nn as nn
from apex.optimizers import FP16_Optimizer, FusedAdam


class Resumable(FP16_Optimizer):
    def state_dict(self):
        state = {"dynamic_loss_scale": self.dynamic_loss_scale, "cur_scale": self.cur_scale, "cur_iter": self.cur_iter}
        if self.dynamic_loss_scale:
            for name in ("last_overflow_iter", "scale_factor", "scale_window"):
                state[name] = getattr(self, name)
        state["optimizer_state_dict"] = self.optimizer.state_dict()
        state["fp32_groups_flat"] = self.fp32_groups_flat
        return state

    def load_state_dict(self, state):
        for name in ("dynamic_loss_scale", "cur_scale", "cur_iter"):
            setattr(self, name, state[name])
        if self.dynamic_loss_scale:
            for name in ("last_overflow_iter", "scale_factor", "scale_window"):
                setattr(self, name, state[name])
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        for current, saved in zip(self.fp32_groups_flat, state["fp32_groups_flat"]):
            current.data.copy_(saved.data)


def build():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)).half()
    decay = [p for n, p in model.named_parameters() if "bias" not in n]
    rest = [p for n, p in model.named_parameters() if "bias" in n]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    inner = FusedAdam(groups, lr=3e-3, bias_correction=False, max_grad_norm=1.0)
    return model, Resumable(inner, dynamic_loss_scale=True)


def train(model, optimizer, steps):
    losses = []
    for t in steps:
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(t))
        loss = (model(x.half()).float()[:, 0] - x[:, 0]).pow(2).mean()
        # One poisoned batch, whose step is skipped.
        optimizer.backward(loss * float("inf") if t == 3 else loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    model, optimizer = build()
    losses = train(model, optimizer, range(20))
    assert optimizer.cur_iter == 20 and optimizer.last_overflow_iter == 3
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    rest = train(model, optimizer, range(20, 40))

    file.seek(0)
    saved = torch.load(file)
    again, resumed = build()
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert train(again, resumed, range(20, 40)) == rest
    assert resumed.cur_scale == optimizer.cur_scale and resumed.cur_iter == 40
    print(f"loss {losses[0]:.3f} -> {rest[-1]:.3f}")
    assert rest[-1] < losses[0]


if __name__ == "__main__":
    main()
