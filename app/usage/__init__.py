"""The ledger: one row per admitted request, and what is added up from it."""
