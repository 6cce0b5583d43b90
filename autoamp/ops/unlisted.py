"""The functions of torch that are replaced for casts though no list names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from autoamp import torch_private
from autoamp.casting import CastState
from autoamp.ops.attention import build_fast_path_check, build_half_attention
from autoamp.ops.half_interop import interop_functions
from autoamp.ops.recurrent import build_check_input
from autoamp.ops.scripted import build_script_call


def unlisted_functions(casts: CastState) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield the owner and the name of each, and what builds its replacement."""
    yield torch.backends.mha, "get_fastpath_enabled", partial(build_fast_path_check, casts=casts)
    if torch_private.CHECK_INPUT is not None:
        yield torch.nn.RNNBase, torch_private.CHECK_INPUT, partial(build_check_input, casts=casts)
    for kind in torch_private.SCRIPTED:
        yield kind, "__call__", partial(build_script_call, casts=casts)
    if casts.in_modules:
        yield from interop_functions(casts)
    if not casts.on_by_default:
        yield torch.nn.functional, "scaled_dot_product_attention", partial(build_half_attention, casts=casts)
