"""The tree's `apex.amp.compat`."""

from autoamp.compat.amp.utils import filter_attrs
