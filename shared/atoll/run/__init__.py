"""Reading a run, for every role: its record, heads, chain of keyframes and deltas, ledger, and the view of all of them."""
