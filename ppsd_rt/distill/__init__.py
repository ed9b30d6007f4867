"""Self-distillation of exit heads: text sampled from the model itself, heads trained to foresee what it says."""
