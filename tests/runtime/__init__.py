"""Tests of `autoamp.runtime`."""
