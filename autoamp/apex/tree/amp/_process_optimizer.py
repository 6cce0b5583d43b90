"""The tree's `apex.amp._process_optimizer`."""

from autoamp.apex.amp.state import AmpStash as AmpOptimizerState
