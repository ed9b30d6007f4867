"""The prompt pass: all rows of a prompt but the last through all layers, many at a time.

The last token of a prompt is the first row of the answer's first pass, through the kernels of every other pass. So
plain decoding and every schedule begin from the same rows, and a pass over a prompt that keeps rows of an earlier one
gives what it would give alone: a prompt's rows come from prompt passes only.
"""

import torch
from torch import Tensor

from ..triton_kernels.prompt_attention import prompt_attention
from ..triton_kernels.prompt_layers import normalise, prompt_linear, prompt_qkv, prompt_swiglu
from .buffers import Buffers
from .weights import DeviceWeights, Layer

ROWS = 1024  # at a time: what stands between the layers takes little memory


class PromptPass:
    """Launched eagerly; its buffers are made for the longest pass so far."""

    def __init__(self, weights: DeviceWeights, buffers: Buffers) -> None:
        self.weights, self.buffers = weights, buffers
        self._x = torch.empty(0)

    def run(self, start: int, end: int) -> None:
        """Rows [start, end): the KV cache of every layer and of the exit head's, and the exit hidden states."""
        self._make(min(ROWS, end - start))
        for first in range(start, end, ROWS):
            self._rows(first, min(first + ROWS, end))

    def _make(self, rows: int) -> None:
        config, device, dtype = self.weights.config, self.weights.device, self.weights.dtype
        if rows <= len(self._x):
            return
        width = config.num_attention_heads * config.head_dim
        self._x = torch.empty(rows, config.hidden_size, device=device)
        self._normed = torch.empty(rows, config.hidden_size, dtype=dtype, device=device)
        self._queries, self._mixed = torch.empty(2, rows, width, dtype=dtype, device=device).unbind()
        self._inner = torch.empty(rows, config.intermediate_size, dtype=dtype, device=device)

    def _rows(self, start: int, end: int) -> None:
        b, weights = self.buffers, self.weights
        x = b.exit_hidden[start:end]
        x.copy_(weights.embedding[b.text[start:end].long()])
        for number, layer in enumerate(weights.layers[: weights.exit_layer]):
            self._layer(layer, number, x, start)
        heads = weights.head.layers if weights.head else ()
        for number, layer in enumerate(heads, len(weights.layers)):
            if number < len(weights.layers) + len(heads) - 1:
                x = self._x[: end - start].copy_(x)
                self._layer(layer, number, x, start)
            else:  # what the rows become behind the last one is asked of new rows only
                self._qkv(layer, number, x, start)
        x = self._x[: end - start].copy_(b.exit_hidden[start:end])
        for number in range(weights.exit_layer, len(weights.layers)):
            self._layer(weights.layers[number], number, x, start)
        if len(b.last_hidden):
            b.last_hidden[start:end] = x

    def _qkv(self, layer: Layer, number: int, x: Tensor, start: int) -> Tensor:
        """-> queries [rows, heads, head_dim]."""
        b, config = self.buffers, self.weights.config
        normed = self._normed[: len(x)]
        queries = self._queries[: len(x)].view(len(x), config.num_attention_heads, config.head_dim)
        normalise(x, layer.norm, config.rms_norm_eps, normed)
        prompt_qkv(
            normed, layer.qkv, layer.qkv_bias, b.cosines, b.sines, queries, b.keys[number], b.values[number], start
        )
        return queries

    def _layer(self, layer: Layer, number: int, x: Tensor, start: int) -> None:
        b, normed = self.buffers, self._normed[: len(x)]
        queries, mixed = self._qkv(layer, number, x, start), self._mixed[: len(x)]
        prompt_attention(queries, b.keys[number], b.values[number], mixed.view_as(queries), start)
        prompt_linear(mixed, layer.out, x, bias=layer.out_bias, residual=x)
        assert layer.post_norm is not None
        assert layer.gate_up is not None
        assert layer.down is not None
        normalise(x, layer.post_norm, self.weights.config.rms_norm_eps, normed)
        inner = self._inner[: len(x)]
        prompt_swiglu(normed, layer.gate_up, inner)
        prompt_linear(inner, layer.down, x, residual=x)
