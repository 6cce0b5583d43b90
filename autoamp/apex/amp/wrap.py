"""`apex.amp.wrap`. Its functions wrote casts into torch, which the lists do; their names tell the remedy."""

from autoamp.core import disable_casts
