"""Tests of `autoamp.parallel`."""
