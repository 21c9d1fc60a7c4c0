"""What every room stands on: errors, logs, clocks, files, waiting, memory for large arrays. No knowledge of training."""

VERSION = "0.1.0"
