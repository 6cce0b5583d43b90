"""The tree's `apex.amp.compat`."""

from autoamp.apex.amp.utils import filter_attrs
