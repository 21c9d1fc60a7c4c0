"""Deterministic simulation of the production drivers: one seed decides a whole run with all its faults (docs/explanation/schedules.md)."""
