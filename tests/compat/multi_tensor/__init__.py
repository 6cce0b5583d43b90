"""Tests of `autoamp.compat.multi_tensor`."""
