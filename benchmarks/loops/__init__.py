"""The loops people have, as islands: what each costs and survives."""
