"""Self-distillation of exit heads: text sampled from the model itself, heads trained to foresee what it says."""

from ..extras import need

need("torch", "torch", "distillation")
