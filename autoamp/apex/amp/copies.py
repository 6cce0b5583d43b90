"""Arguments that copies of Apex for other devices added to ``amp.initialize``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from autoamp.apex.amp.properties import as_flag
from autoamp.errors import UsageError

logger = logging.getLogger(__name__)

# They join gradients to unscale them in one launch, as is done here in any case; what a program registers itself goes
# before the lists here in any case.
_NO_EFFECT = ("combine_grad", "check_combined_tensors", "ddp_replica_count", "user_cast_preferred")
_RULE = ("dynamic_init_scale", "scale_growth_factor", "scale_backoff_factor", "scale_window")


def check(given: Mapping[str, Any]) -> None:
    """Log those arguments that change nothing here.

    Raises:
        UsageError: An argument would change something.
        TypeError: No copy has such an argument.
    """
    for name, value in given.items():
        if name in _RULE:
            raise UsageError(
                f"{name}={value!r} is not taken; pass loss_scale=autoamp.DynamicLossScaler(init_scale, growth_factor, "
                "backoff_factor, growth_interval)"
            )
        if name == "combine_ddp" and as_flag(name, value):
            raise UsageError(
                f"combine_ddp={value!r} is not taken; after initialize() wrap the model in "
                "torch.nn.parallel.DistributedDataParallel"
            )
        if name not in (*_NO_EFFECT, "combine_ddp"):
            raise TypeError(f"initialize() got an unexpected keyword argument {name!r}")
    if given:
        logger.info("initialize: %s have no effect, gradients are unscaled in one pass anyway", ", ".join(given))
