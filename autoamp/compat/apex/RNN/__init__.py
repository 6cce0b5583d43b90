"""The tree's `apex.RNN`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.rnn import GRU, LSTM, ReLU, Tanh, mLSTM

from . import RNNBackend, models

__getattr__ = missing_names(__name__)
