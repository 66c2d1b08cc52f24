"""API keys: made, shown once, verified, rotated, revoked."""
