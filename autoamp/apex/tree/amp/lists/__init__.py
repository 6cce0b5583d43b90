"""The tree's `apex.amp.lists`."""
