"""The simulator: whole runs in one process, real learners and shards among a modelled network, in virtual time."""
