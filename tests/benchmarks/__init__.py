"""What a patched call costs against torch.autocast. Reported, never asserted: `python -m tests.benchmarks`."""
