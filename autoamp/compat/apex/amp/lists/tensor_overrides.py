"""The tree's `apex.amp.lists.tensor_overrides`, read off the list set `apex`."""

from __future__ import annotations

import torch

from autoamp.compat.listed import names_of
from autoamp.compat.missing import missing_names

MODULE = torch.Tensor
FP16_FUNCS = names_of(MODULE, "fp16")
FP32_FUNCS = names_of(MODULE, "fp32")
CASTS = names_of(MODULE, "promote")
SEQUENCE_CASTS: list[str] = []
BANNED_FUNCS = names_of(MODULE, "banned")

__getattr__ = missing_names(__name__)
