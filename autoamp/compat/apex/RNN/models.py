"""The tree's `apex.RNN.models`."""

from __future__ import annotations

from autoamp.compat.missing import missing_names
from autoamp.compat.rnn import GRU, LSTM, ReLU, Tanh, bidirectionalRNN, mLSTM, stackedRNN

__getattr__ = missing_names(__name__)
