"""The audit log: who did what to what, append-only."""
