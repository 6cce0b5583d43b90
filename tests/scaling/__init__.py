"""Tests of `autoamp.scaling`."""
