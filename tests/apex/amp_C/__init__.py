"""Tests of `autoamp.apex.amp_C`."""
