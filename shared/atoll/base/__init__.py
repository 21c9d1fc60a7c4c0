"""Foundation of every room: errors, logs, clocks, files, waiting, memory for large arrays. No knowledge of training."""

VERSION = "0.1.0"
