"""Torch's global hooks, for what is heard with or without an active handle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoamp.core.patches import PatchSet, imitate

Hear = Callable[..., Any] | None


def listen(
    *,
    optimizer_called: Hear = None,
    optimizer_returned: Hear = None,
    module_called: Hear = None,
    module_returned: Hear = None,
    module_registered: Hear = None,
    around_load_optimizer: Hear = None,
) -> contextlib.ExitStack:
    """Call functions until the returned stack is closed: torch calls them in the order in which they were given.

    Args:
        optimizer_called: Called with an optimizer, ``args`` and ``kwargs`` as its own step begins; not at a skip.
        optimizer_returned: Called with the same at the end of that step, unless it raised.
        module_called: Called with a module and its inputs.
        module_returned: Called with a module, its inputs and its outputs, also if it raised.
        module_registered: Called with a module, a name and the module that it gets under that name.
        around_load_optimizer: Called with ``Optimizer.load_state_dict``; returns what is called in its place.
    """
    stack = contextlib.ExitStack()
    for hear, register in (
        (optimizer_called, register_optimizer_step_pre_hook),
        (optimizer_returned, register_optimizer_step_post_hook),
        (module_called, register_module_forward_pre_hook),
        (module_returned, lambda hear: register_module_forward_hook(hear, always_call=True)),
        (module_registered, register_module_module_registration_hook),
    ):
        if hear is not None:
            stack.callback(register(hear).remove)
    if around_load_optimizer is not None:
        patches, load = PatchSet(), Optimizer.load_state_dict
        patches.replace(Optimizer, "load_state_dict", imitate(around_load_optimizer(load), load))
        stack.callback(patches.restore)
    return stack
