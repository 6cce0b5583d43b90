"""The tree's `apex.amp.rnn_compat`."""

from __future__ import annotations

from autoamp.compat.amp.utils import has_old_rnns
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
