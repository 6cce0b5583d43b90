"""The networks that `apex.RNN` builds."""

from autoamp.apex.RNN.models import bidirectionalRNN, stackedRNN
