"""Tests of `autoamp.compat.amp`."""
