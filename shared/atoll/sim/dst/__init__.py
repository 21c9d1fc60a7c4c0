"""Deterministic simulation testing: a world that may fail in every way, in which every promise is checked."""
