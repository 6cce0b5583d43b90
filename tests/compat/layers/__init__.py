"""Tests of `autoamp.compat.layers`."""
