"""Tests of `autoamp.diagnostics`."""
