"""What `optimizer.step()` does: guarded steps, `scale_loss` blocks, fp32 masters."""

from __future__ import annotations

from autoamp.stepping.attach import (
    ScalesItself,
    is_optimizer,
    living_optimizers_and_modules,
    named_params,
    refuse_unguardable,
    stepped_params,
)
from autoamp.stepping.block import open_blocks, scaled_block
from autoamp.stepping.guard import StepGuard
from autoamp.stepping.links import (
    equalized,
    has_written_masters,
    load_master,
    master_of,
    refresh_params,
    release_master,
)
from autoamp.stepping.loss_scalers import as_list
from autoamp.stepping.masters import MasterWeights, fit_state
from autoamp.stepping.optimizer_steps import OptimizerSteps
from autoamp.stepping.optimizers import GuardedOptimizers, clip_grad_norm_, joint_norm, wrap_optimizer
from autoamp.stepping.overflow_checks import OverflowCheck, read_checks
from autoamp.stepping.ranks import RequestedGroup, several_processes
from autoamp.stepping.scaled_backward import BackwardWatch
from autoamp.stepping.setting_warnings import check_half_model, check_half_norms
from autoamp.stepping.skips import Skips, Step, StepOwner

__all__ = [
    "BackwardWatch",
    "GuardedOptimizers",
    "MasterWeights",
    "OptimizerSteps",
    "OverflowCheck",
    "RequestedGroup",
    "ScalesItself",
    "Skips",
    "Step",
    "StepGuard",
    "StepOwner",
    "as_list",
    "check_half_model",
    "check_half_norms",
    "clip_grad_norm_",
    "equalized",
    "fit_state",
    "has_written_masters",
    "is_optimizer",
    "joint_norm",
    "living_optimizers_and_modules",
    "load_master",
    "master_of",
    "named_params",
    "open_blocks",
    "read_checks",
    "refresh_params",
    "refuse_unguardable",
    "release_master",
    "scaled_block",
    "several_processes",
    "stepped_params",
    "wrap_optimizer",
]
