"""Tests of `autoamp.patching`."""
