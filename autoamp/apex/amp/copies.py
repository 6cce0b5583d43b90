"""Arguments that copies of Apex for other devices added to ``amp.initialize``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from autoamp.apex.amp.properties import as_flag
from autoamp.errors import UsageError

logger = logging.getLogger(__name__)

_SCALER = "pass loss_scale=autoamp.DynamicLossScaler(init_scale, growth_factor, backoff_factor, growth_interval)"
# The remedy for an argument that would change something; an empty one for an argument that would not.
_REMEDIES = {
    **dict.fromkeys(("dynamic_init_scale", "scale_growth_factor", "scale_backoff_factor", "scale_window"), _SCALER),
    "combine_ddp": "after initialize() wrap the model in torch.nn.parallel.DistributedDataParallel",
    # They join gradients to unscale them in one launch, as is done here in any case.
    **dict.fromkeys(("combine_grad", "check_combined_tensors", "ddp_replica_count"), ""),
    # What a program registers itself goes before the lists here in any case.
    "user_cast_preferred": "",
}


def check(given: Mapping[str, Any]) -> None:
    """Log those arguments that change nothing here.

    Raises:
        UsageError: An argument would change something.
        TypeError: No copy has such an argument.
    """
    for name, value in given.items():
        if name not in _REMEDIES:
            raise TypeError(f"initialize() got an unexpected keyword argument {name!r}")
        is_asked = as_flag(name, value) if name == "combine_ddp" else True
        if _REMEDIES[name] and is_asked:
            raise UsageError(f"{name}={value!r} is not taken; {_REMEDIES[name]}")
    if given:
        logger.info("initialize: %s have no effect, gradients are unscaled in one pass anyway", ", ".join(given))
