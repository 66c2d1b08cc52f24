"""The real engine under timed traffic, in this process: for `benchmarks/live_budgets.py`."""
