"""The tree's `apex.RNN.models`."""

from autoamp.compat.layers.rnn import GRU, LSTM, ReLU, Tanh, bidirectionalRNN, mLSTM, stackedRNN
