"""What the benchmarks share: figures, pages, intervals of confidence."""
