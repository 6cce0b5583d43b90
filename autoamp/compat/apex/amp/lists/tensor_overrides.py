"""The tree's `apex.amp.lists.tensor_overrides`, read off the list set `apex`."""

from __future__ import annotations

import torch

from autoamp.compat.amp.listed import names_of

MODULE = torch.Tensor
names = names_of(MODULE)

# Copies: what a program adds or removes takes effect at its next `amp.init` or `amp.initialize`.
FP16_FUNCS = list(names["fp16"])
FP32_FUNCS = list(names["fp32"])
CASTS = list(names["promote"])
SEQUENCE_CASTS: list[str] = []
BANNED_FUNCS = list(names["banned"])
