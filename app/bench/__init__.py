"""Traffic and its judgement: workloads, outcomes, reports, and the open-loop driver of `bench`."""
