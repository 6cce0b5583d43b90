"""The tree's `apex.RNN`."""

from __future__ import annotations

from autoamp.compat.layers.rnn import GRU, LSTM, ReLU, Tanh, mLSTM
from autoamp.compat.missing import missing_names

from . import RNNBackend, models

__getattr__ = missing_names(__name__)
