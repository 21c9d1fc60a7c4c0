"""A run as every role reads it: its record, heads, chain of keyframes and deltas, ledger, and its history."""
