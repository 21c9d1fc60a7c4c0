"""Checkpoints of a run outside its broker, and the way back."""
