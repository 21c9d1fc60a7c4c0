"""Records of a monitor: a journal, always; and metrics for W&B, TensorBoard or trackio, where a setting names them."""
