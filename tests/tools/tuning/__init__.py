"""Tests of `autoamp.tools.tuning`."""
