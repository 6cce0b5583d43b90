"""`apex.RNN`: recurrent networks."""

from autoamp.apex.RNN.models import GRU, LSTM, ReLU, Tanh, mLSTM
