"""Counters kept in SQL: of what workers do, whose own metrics nobody could scrape."""
