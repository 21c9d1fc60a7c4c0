"""What happened in a run and why, in words, from its event log."""
