"""Tests of `autoamp.levels`."""
