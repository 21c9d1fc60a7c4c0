"""Training as users meet it: their text, their first model, their loops, their checkpoints."""
