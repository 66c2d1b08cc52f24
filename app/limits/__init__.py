"""What a tenant and a key may do per minute and at once."""
