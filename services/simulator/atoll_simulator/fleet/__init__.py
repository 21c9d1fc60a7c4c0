"""Fleets of up to millions of chips in virtual time: the cost of failures, and how the production machines cope."""
