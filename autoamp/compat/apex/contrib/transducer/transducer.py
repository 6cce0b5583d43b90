"""The tree's `apex.contrib.transducer.transducer`."""

from autoamp.compat.layers.transducer import TransducerJoint, TransducerLoss
