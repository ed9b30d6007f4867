"""`ppsd-run check --tokens N`: random cases of speculative decoding, compared with plain decoding."""
