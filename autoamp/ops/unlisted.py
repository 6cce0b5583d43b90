"""The functions of torch that are replaced for casts though no list names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from autoamp import torch_private
from autoamp.casting import CastState
from autoamp.ops.half_interop import interop_functions
from autoamp.ops.recurrent import build_check_input
from autoamp.ops.scripted import build_script_call
from autoamp.patching import imitate


def unlisted_functions(casts: CastState) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield the owner and the name of each, and what builds its replacement."""
    yield torch.backends.mha, "get_fastpath_enabled", partial(_build_fast_path_check, casts=casts)
    if torch_private.CHECK_INPUT is not None:
        yield torch.nn.RNNBase, torch_private.CHECK_INPUT, partial(build_check_input, casts=casts)
    for kind in torch_private.SCRIPTED:
        yield kind, "__call__", partial(build_script_call, casts=casts)
    if casts.in_modules:
        yield from interop_functions(casts)


def _build_fast_path_check(original: Callable[[], bool], casts: CastState) -> Any:
    """Build what the attention modules of torch ask for whether they may take their fast path for inference.

    That path computes all in the dtype of its input, norms included, so that a model would compute other bits without
    gradients. It is shut, as torch shuts it in its autocast regions. It stays open where the program turned casts off,
    and in `Handle.inference`, which promises speed.
    """

    def get_fastpath_enabled() -> bool:
        is_off = casts.on_by_default and casts.local.mode.on is False
        return original() if is_off or casts.cache.pins else False

    return imitate(get_fastpath_enabled, original)
