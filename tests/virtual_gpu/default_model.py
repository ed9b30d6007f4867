"""The default model's first tokens on a virtual GPU, beside the twin of the whole model: prints JSON.

The twin is the kernels' own twins in the order of ppsd_rt/cuda/launches.py, rounded where the kernels round: the
residual stream is float32, what enters a product, the KV cache and what leaves attention and the MLP are bfloat16. It
reads the GPU's text: `best` are its tokens after each of them, `margins` how far the GPU's own is from the best, in
float32 logits.

    python default_model.py LIBRARY CAPABILITY TOKENS
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from ppsd_rt.models.resolve import resolve_model
from ppsd_rt.sampling.params import SamplingParams

sys.path.append(str(Path(__file__).parents[1]))
from virtual_gpu.device import install

PROMPT = "The capital of France is"


def twin_logits(engine, ids: list[int]) -> Tensor:
    """float32 [rows, vocabulary], of all rows of the text."""
    from kernel_twins import attention_twin, linear_twin, qkv_twin, swiglu_twin

    from ppsd_rt.models.rope import Rope

    weights, config = engine.backend.weights, engine.config
    rope, eps = Rope(config, len(ids), "cpu"), config.rms_norm_eps
    x = weights.embedding[ids].float()  # [rows, hidden], the residual stream
    for layer in weights.layers:
        q, k, v = qkv_twin(
            x.bfloat16(), layer.norm, eps, layer.qkv, layer.qkv_bias, rope.cos, rope.sin,
            config.num_attention_heads, config.num_key_value_heads, 0, kv=layer.kv,
        )  # fmt: skip
        keys, values = (each.bfloat16().transpose(0, 1) for each in (k, v))  # [kv_heads, rows, head_dim]
        mixed = attention_twin(q.bfloat16(), keys, values, 0).flatten(1).bfloat16()
        x = linear_twin(mixed, layer.out, residual=x)
        inner = swiglu_twin(x.bfloat16(), layer.post_norm, eps, layer.gate_up).bfloat16()
        x = linear_twin(inner, layer.down, residual=x)
    return linear_twin(x.bfloat16(), weights.lm_head, norm=weights.norm, eps=eps)


def main() -> None:
    library, sm, tokens = sys.argv[1:]
    torch.set_num_threads(1)
    gpu = install(Path(library), int(sm))
    from ppsd_rt.engine import Engine  # after the GPU: it imports the kernels

    folder = resolve_model("smollm2-135m")
    engine = Engine.from_pretrained(folder, backend="cuda", device="cpu", dtype="bfloat16", exit_head="none")
    prompt = list(engine.encode(PROMPT))
    done = engine.generate(prompt, SamplingParams(max_tokens=int(tokens), ignore_eos=True), "plain").run()
    ids = list(done.ids)
    logits = twin_logits(engine, [*prompt, *ids[:-1]])[-len(ids) :]
    margins = (logits.max(-1).values - logits[torch.arange(len(ids)), ids]).tolist()
    found = {"ids": ids, "best": logits.argmax(-1).tolist(), "margins": margins, "text": done.text}
    print(json.dumps({**found, "fault": gpu.fault or gpu.first_race, "instructions": gpu.instructions}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
