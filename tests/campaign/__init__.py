"""Random cases of speculative decoding, compared with plain decoding."""
