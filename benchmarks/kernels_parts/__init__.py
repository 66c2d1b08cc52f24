"""What `python -m benchmarks.kernels` checks and times: cases by operation, and a clock."""
