"""Fused Triton kernels, one file each, with a slow twin that says in numpy or torch what the kernel computes."""
