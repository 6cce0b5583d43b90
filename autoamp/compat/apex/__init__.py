"""Apex, as autoamp serves it: imported by the name `apex` once `autoamp.compat.install_as_apex` was called."""

from autoamp.compat.alias import APEX_VERSION as __version__

from . import RNN, amp, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel, pyprof, reparameterization
