"""The tree's `apex.RNN.RNNBackend`."""

from autoamp.apex.layers.rnn import bidirectionalRNN, stackedRNN
