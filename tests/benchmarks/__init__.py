"""What whole steps of real models cost beside torch.autocast: `python -m tests.benchmarks`."""
