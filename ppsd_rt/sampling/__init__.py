"""Sampling parameters, and the noise that tokens are drawn with."""
