"""What another setting would have given: the recording of a real run, fitted, simulated as it was, and as it would be."""
