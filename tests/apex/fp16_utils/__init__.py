"""Tests of `autoamp.apex.fp16_utils`."""
