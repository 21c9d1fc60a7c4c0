"""Text in, batches out: tokenizers, preparation, memory-mapped shards, and reading by leased blocks. No JAX here."""
