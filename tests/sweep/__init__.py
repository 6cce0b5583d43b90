"""The sweep: every OpInfo sample of torch under autoamp in fp16, and some of each op in bf16. Runs by `-m sweep`."""
