"""Deterministic simulation: the production machines in a world of virtual time, where one seed decides everything."""
