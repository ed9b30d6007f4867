"""The reference backend: eager torch, readable, the twin that every fast path is compared with."""
