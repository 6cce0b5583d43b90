"""State of a training as `torch.distributed.checkpoint` saves it: model, optimizers, masters and loss scales."""

from __future__ import annotations

from autoamp.checkpoints.distributed_state import DistributedState as DistributedState
