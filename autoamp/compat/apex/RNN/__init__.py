"""The tree's `apex.RNN`."""

from autoamp.compat.layers.rnn import GRU, LSTM, ReLU, Tanh, mLSTM
