"""Tests of `autoamp.cli`."""
