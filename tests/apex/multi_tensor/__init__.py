"""Tests of `autoamp.apex.multi_tensor`."""
