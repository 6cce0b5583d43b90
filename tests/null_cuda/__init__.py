"""Beside torch.autocast on a CUDA device that computes nothing. Runs by `python -m tests.null_cuda`, not by default."""
