"""Tenants: who is served, within which limits."""
