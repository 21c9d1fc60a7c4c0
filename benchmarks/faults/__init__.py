"""Real processes under storms of faults."""
