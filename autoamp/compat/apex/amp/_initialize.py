"""The tree's `apex.amp._initialize`."""

from autoamp.compat.amp.api import initialize as _initialize
