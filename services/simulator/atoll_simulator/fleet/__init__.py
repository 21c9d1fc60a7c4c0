"""Fleets of up to millions of chips in virtual time: what failures cost, and what the production machines make of it."""
