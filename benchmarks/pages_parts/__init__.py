"""The rows that `benchmarks.pages` looks at, and what it asks for."""
