"""The prompt pass: all rows of a prompt but the last through all layers, many at a time.

The last token of a prompt is the first row of the answer's first pass, through the kernels of every other pass. So
plain decoding and every schedule begin from the same rows, and a pass over a prompt that keeps rows of an earlier one
gives what it would give alone: a prompt's rows come from prompt passes only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..triton_kernels.prompt_attention import prompt_attention
from ..triton_kernels.prompt_layers import normalise, prompt_linear, prompt_qkv, prompt_swiglu
from . import devices
from .buffers import Buffers, Cache, Site, rotations_of
from .weights import DeviceWeights, Layer

ROWS = 1024  # at a time: what stands between the layers takes little memory


class PromptPass:
    """Launched eagerly, on each device that has layers."""

    def __init__(self, weights: DeviceWeights, buffers: Buffers, sites: Sequence[Site]) -> None:
        """sites: of each layer, those of the exit head are at home."""
        self.weights, self.buffers = weights, buffers
        self._sites = sites
        self._layers = {site.device: PromptLayers(weights, site) for site in (buffers, *sites)}
        self._pages = {site.device: site.pages for site in (buffers, *sites)}

    def run(self, start: int, end: int) -> None:
        """Rows [start, end): the KV cache of every layer and of the exit head's, and the exit hidden states."""
        for layers in self._layers.values():
            layers.reserve(min(ROWS, end - start))
        for first in range(start, end, ROWS):
            self._rows(first, min(first + ROWS, end))

    def _rows(self, start: int, end: int) -> None:
        b, weights = self.buffers, self.weights
        x, at = b.exit_hidden[start:end], b.device
        x.copy_(weights.embedding[b.text[start:end].long()])
        for number, layer in enumerate(weights.layers[: weights.exit_layer]):
            self._layers[at].layer(layer, number, x, start, b.pages)
        self._layers[at].head(x, start, b.pages)
        for number in range(weights.exit_layer, len(weights.layers)):
            layers = self._layers[self._sites[number].device]
            if number == weights.exit_layer or layers.site.device != at:
                x, at = layers.taken(x), layers.site.device
            layers.layer(weights.layers[number], number, x, start, self._pages[at])
        for site in {self._sites[len(weights.layers) - 1], b} if weights.hears else ():
            site.last_hidden[start:end] = x


class PromptLayers:
    """A device's layers; its buffers are made for the longest pass so far."""

    def __init__(self, weights: DeviceWeights, site: Cache) -> None:
        self.weights, self.site = weights, site
        self._between = Between(weights, 0, site.device)

    def reserve(self, rows: int) -> None:
        if rows > len(self._between.x):
            self._between = Between(self.weights, rows, self.site.device)

    def taken(self, x: Tensor) -> Tensor:
        """A copy of rows [rows, hidden] that may be overwritten, here."""
        return self._between.x[: len(x)].copy_(x)

    def head(self, x: Tensor, start: int, pages: Tensor) -> None:
        """x [rows, hidden] at positions start.. through the exit head's own layers; x stays."""
        weights = self.weights
        heads = weights.head.layers if weights.head else ()
        for number, layer in enumerate(heads, len(weights.layers)):
            if number < len(weights.layers) + len(heads) - 1:
                x = self.taken(x)
                self.layer(layer, number, x, start, pages)
            else:  # what the rows become after the last one is asked of new rows only
                with devices.on(self.site.device):
                    self._qkv(layer, number, x, start, pages)

    def layer(self, layer: Layer, number: int, x: Tensor, start: int, pages: Tensor) -> None:
        """x [rows, hidden] at positions start.. -> x. pages: the text's (triton_kernels/texts.py)."""
        between, rows = self._between, len(x)
        normed, mixed, inner = between.normed[:rows], between.mixed[:rows], between.inner[:rows]
        assert layer.post_norm is not None
        assert layer.gate_up is not None
        assert layer.down is not None
        with devices.on(self.site.device):
            queries = self._qkv(layer, number, x, start, pages)
            out, window = mixed.view_as(queries), layer.attention.window
            prompt_attention(queries, self.site.cache[number], pages, out, start, window)
            prompt_linear(mixed, layer.out, x, bias=layer.out_bias, residual=x)
            normalise(x, layer.post_norm, self.weights.config.rms_norm_eps, normed)
            prompt_swiglu(normed, layer.gate_up, inner)
            prompt_linear(inner, layer.down, x, residual=x)

    def _qkv(self, layer: Layer, number: int, x: Tensor, start: int, pages: Tensor) -> Tensor:
        """-> queries [rows, heads, head_dim]."""
        config, between = self.weights.config, self._between
        normed = between.normed[: len(x)]
        queries = between.queries[: len(x)].view(len(x), config.num_attention_heads, config.head_dim)
        normalise(x, layer.norm, config.rms_norm_eps, normed)
        prompt_qkv(
            normed, layer.qkv, layer.qkv_bias, rotations_of(layer, self.site), queries, self.site.cache[number],
            pages, start, kv=layer.kv, norms=layer.norms, eps=config.rms_norm_eps,
        )  # fmt: skip
        return queries


class Between:
    """What the kernels of a prompt's layers hand to each other, on one device."""

    def __init__(self, weights: DeviceWeights, rows: int, device: torch.device) -> None:
        config, dtype = weights.config, weights.dtype
        width = config.num_attention_heads * config.head_dim
        self.x = torch.empty(rows, config.hidden_size, device=device)
        self.normed = torch.empty(rows, config.hidden_size, dtype=dtype, device=device)
        self.queries, self.mixed = torch.empty(2, rows, width, dtype=dtype, device=device).unbind()
        self.inner = torch.empty(rows, config.intermediate_size, dtype=dtype, device=device)
