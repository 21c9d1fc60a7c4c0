"""Checkpoints of a run outside its broker, and the way back.

`object_store`: where bytes are stored. `checkpoints`: what a run checkpoint is. `checkpoint_store`: how they are read and
written. `rebuild`: a run on an empty broker.
"""
