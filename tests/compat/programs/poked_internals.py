"""What scripts did to amp's internals: scales set by hand, the stash, the state as object and as module."""

import apex.amp
import torch
from apex import amp
from apex.amp import _amp_state as state_of_the_package
from apex.amp._amp_state import _amp_state, master_params
from torch import nn

torch.manual_seed(31)
model = nn.Sequential(nn.Linear(5, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
amp._amp_state.allow_incoming_model_not_fp32 = True
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", max_loss_scale=2.0 ** 22)
amp._amp_state.allow_incoming_model_not_fp32 = False

assert apex.amp._amp_state is _amp_state is state_of_the_package
assert len(_amp_state.loss_scalers) == 1 and _amp_state.loss_scalers[0].dynamic
assert _amp_state.opt_properties.opt_level == "O2" and _amp_state.opt_properties.master_weights
assert _amp_state.opt_properties.enabled and _amp_state.max_loss_scale == 2.0 ** 22
assert _amp_state.min_loss_scale is None
assert _amp_state.handle is not None

amp._amp_state.loss_scalers[0]._loss_scale = 2 ** 20
assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2 ** 20
_amp_state.verbosity = 0

if not optimizer._amp_stash.lazy_init_called:
    optimizer._amp_lazy_init()
    optimizer._amp_stash.lazy_init_called = True
stash = optimizer._amp_stash
assert [p.dtype for p in stash.all_fp32_from_fp16_params] == [torch.float32] * 4
assert all(p.dtype != torch.float32 for p in stash.all_fp16_params)
assert len(stash.all_fp32_from_fp32_params) == 2  # of the batch norm

x = torch.randn(64, 5)
y = x[:, :1] - x[:, 1:2]
losses = []
for it in range(80):
    out = model(x)
    loss = nn.functional.mse_loss(out, y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        before = amp._amp_state.loss_scalers[0].loss_scale()
        assert abs(scaled_loss.item() / loss.item() - before) <= 1e-3 * before
        if it == 40:
            # A bad batch: every gradient is inf.
            scaled_loss = scaled_loss * float("inf")
        scaled_loss.backward()
    weights = [p.clone() for p in master_params(optimizer)]
    optimizer.step()
    if it == 40:
        assert amp._amp_state.loss_scalers[0]._has_overflow
        assert amp._amp_state.loss_scalers[0].loss_scale() == before / 2
        assert all(torch.equal(p, w) for p, w in zip(master_params(optimizer), weights))
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
grad_norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
assert amp._amp_state.loss_scalers[0]._unskipped > 0
assert amp._amp_state.loss_scalers[0]._scale_seq_len == 2000
amp._amp_state.loss_scalers[0]._scale_seq_len = 100
print("loss {:.4f} -> {:.4f}".format(losses[0], losses[-1]))
assert losses[-1] < 0.3 * losses[0]
