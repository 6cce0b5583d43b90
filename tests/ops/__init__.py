"""Tests of `autoamp.ops`."""
