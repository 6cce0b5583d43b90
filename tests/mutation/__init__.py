"""Mutation testing: how many small faults, put into the package one by one, its tests find."""
