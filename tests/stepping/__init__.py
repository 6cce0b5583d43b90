"""Tests of `autoamp.stepping`."""
