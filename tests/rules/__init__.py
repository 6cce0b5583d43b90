"""Tests of `autoamp.rules`."""
