"""The command line: one `atoll` in front of everything, light until a verb runs."""
