"""Checkpoints of the `FP16_Optimizer` of early 2019, converted for `autoamp.FP16_Optimizer`.

The optimizer of `apex.optimizers` had one flat fp32 master for each group (key ``fp32_groups_flat``), and flat state of
the optimizer inside. That of `apex.contrib.optimizers` could have a master for each parameter (key ``fp32_groups``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from autoamp.errors import CheckpointError
from autoamp.tensors import unflatten


def converted_state(state: Mapping[str, Any], groups: Sequence[Sequence[Tensor]]) -> Mapping[str, Any]:
    """Return an early checkpoint as `autoamp.FP16_Optimizer.load_state_dict` takes it; any other as it is.

    Args:
        state: A checkpoint of an `FP16_Optimizer`.
        groups: The masters of the optimizer that is to load it, a list for each group.

    Raises:
        CheckpointError: A key is missing, or what it holds does not fit the groups. The message names the key.
    """
    if "cur_scale" not in state:
        return state
    for key in ("dynamic_loss_scale", "optimizer_state_dict"):
        if key not in state:
            raise CheckpointError(f"key {key!r} is missing; pass what FP16_Optimizer.state_dict() returned")
    inner = state["optimizer_state_dict"]
    if "fp32_groups" in state:
        masters = state["fp32_groups"]
    elif "fp32_groups_flat" in state:
        flats = state["fp32_groups_flat"]
        found, wanted = [flat.numel() for flat in flats], [sum(master.numel() for master in group) for group in groups]
        if found != wanted:
            raise CheckpointError(
                f"key 'fp32_groups_flat' holds groups of {found} elements, this optimizer has groups of {wanted}"
            )
        masters = [_parts(flat, group) for flat, group in zip(flats, groups, strict=True)]
        try:
            inner = _split_inner(inner, groups)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"key 'optimizer_state_dict' does not fit: {error!r}") from error
    else:
        raise CheckpointError("neither 'fp32_groups_flat' nor 'fp32_groups' is there; the checkpoint has no masters")
    return {
        "loss_scaler": {"loss_scale": float(state["cur_scale"]), "unskipped": _unskipped(state)},
        "dynamic_loss_scale": state["dynamic_loss_scale"],
        "optimizer_state_dict": inner,
        "fp32_from_fp16": masters,
    }


def _unskipped(state: Mapping[str, Any]) -> int:
    """Return how many steps there were since the last overflow, or since the scale last grew; 0 for a static scale."""
    if not state["dynamic_loss_scale"]:
        return 0
    since = int(state.get("cur_iter", 0)) - int(state.get("last_overflow_iter", -1)) - 1
    return max(since, 0) % int(state.get("scale_window", 1000))


def _parts(flat: Tensor, masters: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the parts of a flat tensor, shaped as the masters."""
    return [part.clone() for part in unflatten(flat.detach().reshape(-1), masters)]


def _split_inner(inner: Mapping[str, Any], groups: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
    """Return an optimizer's flat state by parameter: tensors of a group's size are split, other values go to each."""
    state: dict[int, Any] = {}
    saved_groups = []
    count = 0
    for saved, masters in zip(inner["param_groups"], groups, strict=True):
        keys = list(range(count, count + len(masters)))
        count += len(masters)
        saved_groups.append({**saved, "params": keys})
        of_flat = inner["state"].get(saved["params"][0], {}) if saved["params"] else {}
        size = sum(master.numel() for master in masters)
        for name, value in of_flat.items():
            split = isinstance(value, Tensor) and value.dim() > 0 and value.numel() == size
            for key, part in zip(keys, _parts(value, masters) if split else [value] * len(keys), strict=True):
                state.setdefault(key, {})[name] = part
    return {"state": state, "param_groups": saved_groups}
