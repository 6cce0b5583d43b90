"""Tests of `autoamp.tuning`."""
