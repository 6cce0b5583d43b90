"""What `optimizer.step()` does: guarded steps, `scale_loss` blocks, fp32 masters."""

from __future__ import annotations

from autoamp.stepping.attach import ScalesItself as ScalesItself
from autoamp.stepping.attach import is_optimizer as is_optimizer
from autoamp.stepping.attach import living_optimizers_and_modules as living_optimizers_and_modules
from autoamp.stepping.attach import named_params as named_params
from autoamp.stepping.attach import refuse_unguardable as refuse_unguardable
from autoamp.stepping.attach import stepped_params as stepped_params
from autoamp.stepping.block import UnscaledBlock as UnscaledBlock
from autoamp.stepping.block import open_blocks as open_blocks
from autoamp.stepping.block import scaled_block as scaled_block
from autoamp.stepping.guard import StepGuard as StepGuard
from autoamp.stepping.links import equalized as equalized
from autoamp.stepping.links import has_written_masters as has_written_masters
from autoamp.stepping.links import load_master as load_master
from autoamp.stepping.links import master_of as master_of
from autoamp.stepping.links import refresh_params as refresh_params
from autoamp.stepping.links import release_master as release_master
from autoamp.stepping.loss_scalers import as_list as as_list
from autoamp.stepping.masters import MasterWeights as MasterWeights
from autoamp.stepping.masters import fit_state as fit_state
from autoamp.stepping.nonfinite import NonFiniteSteps as NonFiniteSteps
from autoamp.stepping.optimizer_steps import OptimizerSteps as OptimizerSteps
from autoamp.stepping.optimizers import GuardedOptimizers as GuardedOptimizers
from autoamp.stepping.optimizers import joint_norm as joint_norm
from autoamp.stepping.optimizers import wrap_optimizer as wrap_optimizer
from autoamp.stepping.overflow_checks import OverflowCheck as OverflowCheck
from autoamp.stepping.overflow_checks import read_checks as read_checks
from autoamp.stepping.ranks import RequestedGroup as RequestedGroup
from autoamp.stepping.ranks import several_processes as several_processes
from autoamp.stepping.scaled_backward import BackwardWatch as BackwardWatch
from autoamp.stepping.setting_warnings import check_half_model as check_half_model
from autoamp.stepping.setting_warnings import check_half_norms as check_half_norms
from autoamp.stepping.skips import Skips as Skips
from autoamp.stepping.skips import Step as Step
from autoamp.stepping.skips import StepOwner as StepOwner
