"""The tree's `apex.RNN.models`."""

from autoamp.apex.layers.rnn import GRU, LSTM, ReLU, Tanh, bidirectionalRNN, mLSTM, stackedRNN
