"""The tree's `apex.amp.rnn_compat`."""

from autoamp.compat.amp.utils import has_old_rnns
