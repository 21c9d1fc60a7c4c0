"""The island: everything between a training loop and the bus. `atoll.join` is its entry point."""
