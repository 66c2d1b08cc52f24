"""What `benchmarks.peers` is made of: the workload, the peers' processes, the report."""
