"""Webhooks: tenants' endpoints, signed messages to them, and an outbox that loses none."""
