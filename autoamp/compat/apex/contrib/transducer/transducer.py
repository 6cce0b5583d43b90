"""The tree's `apex.contrib.transducer.transducer`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.transducer import TransducerJoint, TransducerLoss

__getattr__ = missing_names(__name__)
