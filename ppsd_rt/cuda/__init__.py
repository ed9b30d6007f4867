"""The runtime on a GPU: weights, static buffers and the stages made of the Triton kernels, and what launches them."""

from ..extras import need

need("torch", "cuda", "the cuda backend")
