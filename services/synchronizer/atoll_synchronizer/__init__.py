"""The synchronizer: one process per shard; merges its fragments and makes each new version durable, then visible."""
