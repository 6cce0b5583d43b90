"""Tests of `autoamp.casting`."""
