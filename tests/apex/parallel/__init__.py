"""Tests of `autoamp.apex.parallel`."""
