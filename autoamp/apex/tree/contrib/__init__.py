"""The tree's `apex.contrib`."""
