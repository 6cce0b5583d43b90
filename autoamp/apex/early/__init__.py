"""Scalers, optimizers and checkpoints of the Apex of early 2019."""
