"""Backward passes that nobody scaled: scaled on the way in, true where gradients arrive."""

from __future__ import annotations

from autoamp.auto_scaling.auto_scale import AutoScale as AutoScale
from autoamp.auto_scaling.backward_pass import reached_by as reached_by
