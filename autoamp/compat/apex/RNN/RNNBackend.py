"""The tree's `apex.RNN.RNNBackend`."""

from __future__ import annotations

from autoamp.compat.layers.rnn import bidirectionalRNN, stackedRNN
from autoamp.compat.missing import missing_names

__getattr__ = missing_names(__name__)
