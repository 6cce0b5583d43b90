"""The sweep: every OpInfo sample of torch under autoamp. Runs by `pytest -m sweep`, not by default."""
