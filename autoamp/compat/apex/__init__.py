"""Apex, as autoamp serves it: imported by the name `apex` once `autoamp.compat.install_as_apex` was called."""

from __future__ import annotations

from autoamp.compat.alias import APEX_VERSION as __version__
from autoamp.compat.missing import missing_names

from . import RNN, amp, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel, pyprof, reparameterization

__getattr__ = missing_names(__name__)
