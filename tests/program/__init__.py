"""Tests of `autoamp.program`."""
