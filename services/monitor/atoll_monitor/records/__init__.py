"""What a monitor writes down: a journal, always; and metrics for W&B, TensorBoard or trackio, where somebody asks for them."""
