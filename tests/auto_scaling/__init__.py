"""Tests of `autoamp.auto_scaling`."""
