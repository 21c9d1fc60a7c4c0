"""Checkpoints of a run outside its broker, and the way back.

`vault`: where bytes lie. `marks`: what a checkpoint is. `shelf`: reading and writing them. `rebuild`: a run on an empty
broker. docs/explanation/archive.md is for people.
"""
