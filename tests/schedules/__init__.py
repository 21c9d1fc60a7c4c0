"""Deterministic simulation of production's drivers: a seed decides a run with all its faults (docs/explanation/schedules.md)."""
