"""Deterministic simulation of production's drivers: a seed decides a run and all its faults (docs/explanation/schedules.md)."""
