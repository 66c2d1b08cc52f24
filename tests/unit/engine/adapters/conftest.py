"""Hypothesis without a clock: a busy machine must not fail a test."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
