"""Text on its way to token shards."""
