"""Tests of `autoamp.tools`."""
