"""The tree's `apex.RNN`."""

from autoamp.apex.layers.rnn import GRU, LSTM, ReLU, Tanh, mLSTM
