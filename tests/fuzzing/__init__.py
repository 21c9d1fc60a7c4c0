"""A fuzzer of everything that takes bytes from a peer: `make fuzz`."""
