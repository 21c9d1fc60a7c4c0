"""The island: everything between somebody's training loop and the bus. `atoll.join` is its door."""
