"""Modules, losses and pruning with the names of Apex, computed by torch's own functions."""
