"""Tests of `autoamp.core`."""
