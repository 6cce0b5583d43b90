"""The tree's `apex.RNN.RNNBackend`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.rnn import bidirectionalRNN, stackedRNN

__getattr__ = missing_names(__name__)
