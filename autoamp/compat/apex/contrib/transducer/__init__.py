"""The tree's `apex.contrib.transducer`."""

from autoamp.compat.layers.transducer import TransducerJoint, TransducerLoss

from . import transducer
