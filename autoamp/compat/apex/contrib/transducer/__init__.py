"""The tree's `apex.contrib.transducer`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.transducer import TransducerJoint, TransducerLoss

from . import transducer

__getattr__ = missing_names(__name__)
