"""Another setting for a recorded run: its recording, fitted, simulated as it was, and as it would be."""
