"""Tests of `autoamp.apex.layers`."""
