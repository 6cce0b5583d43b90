"""The tree's `apex.amp.rnn_compat`."""

from autoamp.apex.amp.utils import has_old_rnns
