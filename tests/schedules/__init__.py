"""Simulated schedules of faults: the production drivers in virtual time, checked against safety properties."""
