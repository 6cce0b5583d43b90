"""The tree's `apex.amp._process_optimizer`."""

from autoamp.compat.amp.state import AmpStash as AmpOptimizerState
