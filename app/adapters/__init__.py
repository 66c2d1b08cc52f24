"""Adapters: upload, immutable versions, validation, aliases, erasure, and what `model` means."""
