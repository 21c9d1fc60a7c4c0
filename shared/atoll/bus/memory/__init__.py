"""The bus in memory, for the simulator and for unit tests."""
