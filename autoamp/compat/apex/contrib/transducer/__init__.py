"""The tree's `apex.contrib.transducer`."""

from __future__ import annotations

from autoamp.compat.layers.transducer import TransducerJoint, TransducerLoss
from autoamp.compat.missing import missing_names

from . import transducer

__getattr__ = missing_names(__name__)
