"""The simulator: whole runs in one process, real learners and shards on a modelled network, in virtual time."""
