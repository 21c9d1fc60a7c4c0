"""Questions about training, asked in TOML files and answered by grids of runs."""
