"""The tree's `apex.amp.rnn_compat`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.utils import has_old_rnns

__getattr__ = missing_names(__name__)
