"""The reference backend: eager torch, readable, the twin that every fast path is compared with."""

from ..extras import need

need("torch", "torch", "the torch backend")
