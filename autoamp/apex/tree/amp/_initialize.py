"""The tree's `apex.amp._initialize`."""

from autoamp.apex.amp.api import initialize as _initialize
