"""Message schemas and their encoding. Tensors travel as frames (`atoll.codec`), not in here."""
