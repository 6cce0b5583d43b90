"""The tree's `apex.RNN.RNNBackend`."""

from autoamp.compat.layers.rnn import bidirectionalRNN, stackedRNN
