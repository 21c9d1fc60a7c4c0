"""What travels: message schemas and their encoding. Tensors travel as frames (`atoll.codecs`), not in here."""
