"""What stages launch: kernel after kernel over the rows that a pass's words tell of (triton_kernels/state.py).

Whoever runs a row, a draft step, a verification stage, another process, launches these with the same weights: so it
gets the same bits. Nothing is allocated here and nothing is read on the host: all of it can be captured.
"""

from torch import Tensor

from ..triton_kernels.attention import attention
from ..triton_kernels.embedding import embedding
from ..triton_kernels.feedback import feedback
from ..triton_kernels.heads import heads
from ..triton_kernels.linear import linear
from ..triton_kernels.qkv import qkv
from ..triton_kernels.swiglu import swiglu
from .buffers import Cache, Site, Work, rotations_of
from .weights import DeviceWeights, Layer


def decoder_layer(
    weights: DeviceWeights,
    layer: Layer,
    number: int,
    x: Tensor,
    out: Tensor,
    words: Tensor,
    work: Work,
    site: Cache,
    last: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    pdl: bool,
) -> Tensor:
    """x -> out, and from there, after the MLP, to `last` where that is not the same. number: of its KV cache.

    rows: x as a layer of the same pass has left it, rounded, in work.rounded; None: x has come from elsewhere. The
    layer leaves its own result there, too.
    """
    rows, texts = x if rows is None else rows, work.texts
    cache, eps, rotations = site.cache[number], weights.config.rms_norm_eps, rotations_of(layer, site)
    qkv(
        rows, layer.norm, eps, layer.qkv, layer.qkv_bias, rotations, work.queries, cache, words,
        kv=layer.kv, norms=layer.norms, texts=texts, pdl=pdl,
    )  # fmt: skip
    mixed, window = work.mixed.view_as(work.queries), layer.attention.window
    attention(work.queries, cache, work.partials, mixed, words, window=window, texts=texts, pdl=pdl)
    linear(
        work.mixed, layer.out, out, words,
        bias=layer.out_bias, residual=x, rounded=work.rounded, partial=work.sums, texts=texts, pdl=pdl,
    )  # fmt: skip
    if layer.gate_up is None or layer.down is None or layer.post_norm is None:
        return out
    swiglu(work.rounded, layer.post_norm, eps, layer.gate_up, work.inner, words, texts=texts, pdl=pdl)
    last = out if last is None else last
    linear(
        work.inner, layer.down, last, words,
        residual=out, rounded=work.rounded, partial=work.sums, texts=texts, pdl=pdl,
    )  # fmt: skip
    return last


def early_layers(weights: DeviceWeights, words: Tensor, work: Work, site: Site, *, pdl: bool) -> None:
    """Tokens of the text through the layers before the exit, to the exit hidden states."""
    x = site.exit_hidden
    embedding(site.text, weights.embedding, x, work.rounded, words, pdl=pdl)
    for number, layer in enumerate(weights.layers[: weights.exit_layer]):
        decoder_layer(weights, layer, number, x, x, words, work, site, rows=work.rounded, pdl=pdl)


def exit_head(weights: DeviceWeights, words: Tensor, work: Work, site: Site, *, pdl: bool) -> None:
    """Exit hidden states -> work.choices and work.chances: draft tokens and their confidences."""
    head, x, eps = weights.head, site.exit_hidden, weights.config.rms_norm_eps
    assert head is not None, "drafting needs an exit head"
    assert work.scratch is not None
    if head.feedback is not None:
        assert head.feedback_norm is not None
        feedback(x, site.last_hidden, head.feedback_norm, eps, head.feedback, work.x, words, pdl=pdl)
        x = work.x
    rows: Tensor | None = None
    for number, layer in enumerate(head.layers, len(weights.layers)):
        x = decoder_layer(weights, layer, number, x, work.x, words, work, site, rows=rows, pdl=pdl)
        rows = work.rounded
    heads(
        x if rows is None else rows, head.norm, eps, head.lm_head, site.sampling, work.scratch, work.choices,
        work.chances, words, draft_ids=head.draft_ids, pdl=pdl,
    )  # fmt: skip


def lm_head(
    weights: DeviceWeights, words: Tensor, work: Work, site: Site, logits: Tensor | None = None, *, pdl: bool
) -> None:
    """After the pass's last layer -> work.choices: the model's own tokens. logits [16, vocabulary]: for them too."""
    assert work.scratch is not None
    heads(
        work.rounded, weights.norm, weights.config.rms_norm_eps, weights.lm_head, site.sampling, work.scratch,
        work.choices, work.chances, words, logits=logits, pdl=pdl,
    )  # fmt: skip
