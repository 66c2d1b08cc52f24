"""`Idempotency-Key`: a request that is sent twice creates once, and both get the same answer."""
