"""The parts of an `FP16_Optimizer`'s checkpoint, checked before anything is loaded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autoamp.errors import CheckpointError, kind_of


def load_or_restore(optimizer: Any, state_dict: Any) -> None:
    """Let an optimizer load a state. CheckpointError: it cannot, and has its groups and state of before."""
    groups, state = optimizer.param_groups, optimizer.state
    options = [dict(group) for group in groups]
    try:
        optimizer.load_state_dict(state_dict)
        for group in optimizer.param_groups:
            # A number of steps that no float holds would raise at the next step.
            float(group.get("step") or 0)
    except Exception as error:
        # torch replaces groups and state before it looks at the entries of the state.
        optimizer.param_groups, optimizer.state = groups, state
        for group, before in zip(groups, options, strict=True):
            group.clear()
            group.update(before)
        raise CheckpointError(
            f"key 'optimizer_state_dict' does not fit {kind_of(optimizer)} ({type(error).__name__}: {error}); "
            "load the state of an optimizer of this class; nothing was loaded"
        ) from error


def state_of_scaler(saved: Any) -> Any:
    """Return the state of a loss scaler of a checkpoint; Apex pickled the scaler itself, whose fields are read here."""
    fields = getattr(saved, "__dict__", {})
    if "cur_scale" not in fields:
        return saved
    clean = fields.get("cur_iter", 0) - 1 - fields.get("last_overflow_iter", -1)
    return {"loss_scale": fields["cur_scale"], "unskipped": max(clean, 0) % fields.get("scale_window", 2000)}


def matched(ours: list[list[Tensor]], theirs: Any) -> list[tuple[Tensor, Tensor]]:
    """Pair the masters with those of a checkpoint. CheckpointError: groups or shapes differ."""
    shapes = [[tuple(tensor.shape) for tensor in group] for group in ours]
    try:
        values = [list(group) for group in theirs]
    except TypeError:
        values = [[None]]
    if not all(isinstance(tensor, Tensor) and not tensor.is_meta for group in values for tensor in group):
        raise CheckpointError("key 'fp32_from_fp16' is not a list of lists of tensors with data; nothing was loaded")
    found = [[tuple(tensor.shape) for tensor in group] for group in values]
    if shapes != found:
        raise CheckpointError(
            f"key 'fp32_from_fp16' holds masters of shapes {found}, this optimizer has masters of shapes {shapes}"
        )
    return [pair for group, loaded in zip(ours, values, strict=True) for pair in zip(group, loaded, strict=True)]
