"""Layers of Apex, on torch's own functions."""
