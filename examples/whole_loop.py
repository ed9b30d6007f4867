"""The whole idea in numpy: draft with the early layers, verify with the others, keep what is right, roll back the rest.

python examples/whole_loop.py "Why is the sky blue?"

It takes weights and ids from the runtime, and does all else itself. numpy computes a row as slowly among others as
alone, so fewer passes save no time here. What the runtime adds: kernels for which five rows cost little more than one,
number formats, a length of drafts that pays, drafting beside verification, many answers at once.
"""

import argparse

import numpy as np

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.models.head_file import HeadFile, find_shipped
from ppsd_rt.models.stored import as_float32

DRAFTS = 4  # a round; the head hears of a verified row up to six rows later


def linear(x, weight):  # [rows, inputs] -> [rows, outputs]
    # Row by row: a row's bits must not depend on its company, or speculation would change answers.
    return np.stack([weight @ row for row in x])


def norm(x, weight, eps):  # RMSNorm: [rows, hidden] -> [rows, hidden]
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


class Layers:
    """Some decoder layers and their KV cache: rows [0, length) of the text have passed through."""

    def __init__(self, config, tensors, names):
        self.config, self.length = config, 0
        self.weights = [{name[len(prefix) :]: tensors[name] for name in tensors if name.startswith(prefix)}
                        for prefix in names]  # fmt: skip
        # keys, values: [layers, kv heads, positions, head_dim]
        shape = (len(names), config.num_key_value_heads, 0, config.head_dim)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def run(self, x):  # rows at positions [length, length + rows): [rows, hidden] -> [rows, hidden]
        for number, weights in enumerate(self.weights):
            x = x + self._attention(number, norm(x, weights["input_layernorm.weight"], self.config.rms_norm_eps))
            y = norm(x, weights["post_attention_layernorm.weight"], self.config.rms_norm_eps)
            gate, up = linear(y, weights["mlp.gate_proj.weight"]), linear(y, weights["mlp.up_proj.weight"])
            x = x + linear(gate / (1 + np.exp(-gate)) * up, weights["mlp.down_proj.weight"])
        self.length += len(x)
        return x

    def roll_back(self, length):  # rows from `length` on are forgotten; the next ones overwrite them
        self.length = min(self.length, length)

    def _attention(self, number, x):  # [rows, hidden] -> [rows, hidden]
        config, start, end = self.config, self.length, self.length + len(x)
        if end > self.keys.shape[2]:
            more = ((0, 0), (0, 0), (0, 256 + end), (0, 0))
            self.keys, self.values = np.pad(self.keys, more), np.pad(self.values, more)
        weights = self.weights[number]
        q, k, v = (
            linear(x, weights[f"self_attn.{name}_proj.weight"]).reshape(len(x), -1, config.head_dim) for name in "qkv"
        )  # [rows, heads or kv heads, head_dim]
        self.keys[number, :, start:end] = self._rotate(k).swapaxes(0, 1)
        self.values[number, :, start:end] = v.swapaxes(0, 1)
        q = self._rotate(q).reshape(len(x), k.shape[1], -1, config.head_dim)  # query heads share a head of keys
        mixed = []
        for row, position in zip(q, range(start, end), strict=True):  # no row sees what comes after it
            scores = row @ self.keys[number, :, : position + 1].swapaxes(-1, -2) * config.head_dim**-0.5
            scores = np.exp(scores - scores.max(-1, keepdims=True))  # [kv heads, queries of each, positions]
            weighted = scores @ self.values[number, :, : position + 1]
            mixed.append((weighted / scores.sum(-1, keepdims=True)).reshape(-1))
        return linear(np.stack(mixed), weights["self_attn.o_proj.weight"])

    def _rotate(self, x):  # rotary embedding: [rows, heads, head_dim], the rows at `length` and after
        half = self.config.head_dim // 2
        frequencies = self.config.rope_theta ** -(np.arange(half) / half)
        angles = np.outer(np.arange(self.length, self.length + len(x)), frequencies)[:, None]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


class Decoder:
    def __init__(self, checkpoint, head):
        """head: of kind `feedback`, which reads the exit hidden state, and the newest verified row's last one."""
        config = self.config = checkpoint.config
        tensors = self.tensors = {name: as_float32(checkpoint.tensors[name]) for name in checkpoint.tensors}
        self.head = {name: as_float32(tensor) for name, tensor in head.whole.items()}
        exit_layer, layers = head.info.exit_layer, [f"model.layers.{n}." for n in range(config.num_hidden_layers)]
        self.early = Layers(config, tensors, layers[:exit_layer])  # [0, E)
        self.late = Layers(config, tensors, layers[exit_layer:])  # [E, L)
        self.head_layer = Layers(config, self.head, ["layers.0."])
        self.embedding = tensors["model.embed_tokens.weight"]
        self.lm_head = tensors.get("lm_head.weight", self.embedding)
        self.draft_ids = np.arange(config.vocab_size) if head.draft_ids is None else head.draft_ids
        self.draft_lm_head = self.lm_head[self.draft_ids]
        self.exits = np.zeros((0, config.hidden_size), np.float32)  # after layer E, of every row of the text
        self.verified = None  # what the last layer made of the newest verified row

    def run_early(self, ids):
        self.exits = np.concatenate((self.exits[: self.early.length], self.early.run(self.embedding[ids])))

    def draft(self):
        """The exit head's guess at the token after the last row."""
        last = self.early.length - 1
        x = self.exits[self.head_layer.length :].copy()  # rows that the head has not seen
        distance = last - (self.late.length - 1)  # from the newest verified row
        feedback = self.head.get(f"feedback.{distance}.weight")
        if self.verified is not None and feedback is not None:
            x[-1] += feedback @ norm(self.verified, self.head["feedback.norm.weight"], self.config.rms_norm_eps)
        x = norm(self.head_layer.run(x)[-1], self.head["norm.weight"], self.config.rms_norm_eps)
        return int(self.draft_ids[np.argmax(self.draft_lm_head @ x)])

    def verify(self):
        """The model's own next token after each row that only the early layers have seen."""
        hidden = self.late.run(self.exits[self.late.length :])  # [rows, hidden]
        logits = linear(norm(hidden, self.tensors["model.norm.weight"], self.config.rms_norm_eps), self.lm_head)
        return np.argmax(logits, axis=-1).tolist(), hidden

    def roll_back(self, length):
        for layers in (self.early, self.late, self.head_layer):
            layers.roll_back(length)

    def answer(self, prompt, most, drafts=DRAFTS):
        """Yields the tokens of each round: greedy, and the same whatever `drafts` is."""
        self.roll_back(0)
        self.run_early(prompt)
        own, hidden = self.verify()
        text = [*prompt, own[-1]]
        yield [own[-1]]
        while len(text) - len(prompt) < most and text[-1] not in self.config.eos_token_ids:
            self.verified = hidden[-1]
            rows = [text[-1]]  # the newest token has passed no layer yet
            self.run_early(rows)
            while len(rows) <= drafts:  # draft: each guess is a row for the next one
                rows.append(self.draft())
                self.run_early(rows[-1:])
            own, hidden = self.verify()  # all rows in one pass, which costs little more than one
            right = next((i for i, token in enumerate(rows[1:]) if token != own[i]), drafts)
            committed = own[: right + 1]  # the drafts that are right, and one token more
            ends = [place + 1 for place, token in enumerate(committed) if token in self.config.eos_token_ids]
            committed = committed[: min([most - len(text) + len(prompt), *ends])]
            text += committed
            hidden = hidden[: len(committed)]
            self.roll_back(len(text) - 1)  # rows of drafts that were wrong
            yield committed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    engine = Engine.from_pretrained("smollm2-135m", dtype="float32")  # for the text's ids, and to compare with
    checkpoint, prompt = engine.checkpoint, engine.encode([{"role": "user", "content": args.prompt}])
    head = find_shipped(checkpoint)
    assert head is not None
    decoder = Decoder(checkpoint, HeadFile.load(head, checkpoint))
    for drafts in (0, DRAFTS):
        rounds = list(decoder.answer(prompt, args.max_tokens, drafts))
        ids = [token for tokens in rounds for token in tokens]
        print(f"{drafts} drafts a round: {len(ids)} tokens in {len(rounds)} passes of the whole model")
    print(engine.tokenizer.decode(ids))
    same = tuple(ids) == engine.generate(prompt, SamplingParams(max_tokens=args.max_tokens), "plain").run().ids
    print(f"the engine's own ids: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
