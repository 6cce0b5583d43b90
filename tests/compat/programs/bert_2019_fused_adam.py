"""pytorch-pretrained-bert 0.6: the FP16_Optimizer and FusedAdam of apex.optimizers, early 2019."""

import torch
from torch import nn

try:
    from apex.normalization.fused_layer_norm import FusedLayerNorm as BertLayerNorm
except ImportError:
    raise SystemExit("Better speed can be achieved with apex installed from https://www.github.com/nvidia/apex .")


class TinyBert(nn.Module):
    def __init__(self, vocabulary=20, hidden=16):
        super(TinyBert, self).__init__()
        self.embeddings = nn.Embedding(vocabulary, hidden)
        self.LayerNorm = BertLayerNorm(hidden, eps=1e-12)
        self.dense = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, 3)

    def forward(self, ids):
        x = self.LayerNorm(self.embeddings(ids))
        return self.classifier(torch.tanh(self.dense(x)).mean(1))


def train(loss_scale):
    torch.manual_seed(5)
    ids = torch.randint(0, 20, (48, 6))
    labels = ids[:, 0] % 3
    model = TinyBert()
    model.half()
    param_optimizer = list(model.named_parameters())
    no_decay = ["bias", "LayerNorm.bias", "LayerNorm.weight"]
    grouped = [
        {"params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    try:
        from apex.optimizers import FP16_Optimizer
        from apex.optimizers import FusedAdam
    except ImportError:
        raise ImportError("Please install apex to use distributed and fp16 training.")
    optimizer = FusedAdam(grouped, lr=0.01, bias_correction=False, max_grad_norm=1.0)
    if loss_scale == 0:
        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
    else:
        optimizer = FP16_Optimizer(optimizer, static_loss_scale=loss_scale)
    losses = []
    for step in range(60):
        loss = nn.functional.cross_entropy(model(ids).float(), labels)
        optimizer.backward(loss)
        for param_group in optimizer.param_groups:
            param_group["lr"] = 0.01 * (1.0 - step / 60.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(p.dtype == torch.float16 for p in model.parameters())
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    return losses


for scale in (0, 128):
    losses = train(scale)
    print("loss scale {}: {:.4f} -> {:.4f}".format(scale, losses[0], losses[-1]))
    assert losses[-1] < 0.6 * losses[0]
