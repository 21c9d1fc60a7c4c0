"""Programs that measure, each behind a `make` target."""
