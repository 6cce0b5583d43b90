"""Tests of `autoamp.apex.levels`."""
