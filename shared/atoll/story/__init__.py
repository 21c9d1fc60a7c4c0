"""The story of a run in words, from its event log: its events, and why they happened."""
