"""What every role reads of a run: its record, heads, chain of keyframes and deltas, ledger, and the whole view."""
