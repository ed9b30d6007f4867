"""Targets: the files that a model folder, a GGUF file, an exit head, distillation or the cache consists of."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from support import TEMPLATE, VOCAB

from ppsd_rt import PpsdError, SamplingParams, _native
from ppsd_rt.cpu.importance import importance_for
from ppsd_rt.distill.shards import read_shard
from ppsd_rt.models.chat_template import ChatTemplate
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.tokenizer import load_tokenizer
from ppsd_rt.pipeline import learned
from ppsd_rt.pipeline.learned import prior

from . import corpus
from .command_line import run_main
from .mutations import (
    SPECIAL,
    SPECIALS,
    damaged,
    gguf_files,
    json_files,
    json_texts,
    mostly,
    safetensors_files,
    split_safetensors,
    texts,
)
from .oracle import Fault, judge
from .place import Place, learned_of

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, wörld <|im_end|> 1"}]
Run = Callable[[Place, bytes], str]


def answering(name: str) -> Run:
    """A file that decides how the model computes."""

    def run(place: Place, data: bytes) -> str:
        with place.file(place.model / name, data):
            return judge(place.case, place.answer, (PpsdError,))

    return run


def tokenizing(name: str) -> Run:
    """A file that decides what text is."""

    def use(place: Place) -> None:
        tokenizer = load_tokenizer(place.model, VOCAB)
        ids = tokenizer.encode("Hello, wörld <|im_end|> 1")
        if not all(0 <= id < VOCAB for id in ids):
            raise Fault("an id outside the vocabulary")
        tokenizer.decode([*ids, *range(VOCAB)])
        if tokenizer.chat_template is not None:
            tokenizer.chat_template.render(MESSAGES)

    def run(place: Place, data: bytes) -> str:
        with place.file(place.model / name, data):
            return judge(place.case, lambda: use(place), (PpsdError,))

    return run


def chat_template(place: Place, source: str) -> str:
    def use() -> None:
        template = ChatTemplate.from_folder(place.model)
        if template is not None:
            template.render(MESSAGES)

    with place.file(place.model / "chat_template.jinja", source.encode("utf-8", "surrogatepass")):
        return judge(place.case, use, (PpsdError,))


def template_sources(place: Place) -> st.SearchStrategy[str]:
    """Templates that models have, and pieces that no template should."""
    seeds = [TEMPLATE, *corpus.TEMPLATES]
    whole = texts(seeds, " {}%'\n")
    return st.one_of(whole, st.builds(lambda text, piece: text + piece, whole, st.sampled_from(corpus.TEMPLATE_PIECES)))


def weights(place: Place, data: bytes) -> str:
    with place.file(place.model / "model.safetensors", data):
        outcome = judge(place.case, place.answer, (PpsdError,))
    return _once(data, outcome)


def _once(data: bytes, outcome: str) -> str:
    """Raises Fault where a tensor that is there twice was accepted: which one counts is anybody's guess."""

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        if outcome == "accepted" and len(dict(items)) < len(items):
            raise Fault("a header that has a key twice was accepted")
        return dict(items)

    if not data.startswith(SPECIAL):
        try:
            json.loads(split_safetensors(data)[0], object_pairs_hook=pairs)
        except (ValueError, RecursionError):
            if outcome == "accepted":
                raise
    return outcome


def index(place: Place, data: bytes) -> str:
    with place.file(place.sharded / "model.safetensors.index.json", data):
        return judge(place.case, lambda: Checkpoint(place.sharded).hash, (PpsdError,))


def gguf(place: Place, data: bytes) -> str:
    def use() -> None:
        mapped = Checkpoint(place.gguf)
        tokenizer = load_tokenizer(place.gguf, mapped.config.vocab_size)
        assert len(mapped.hash) == 16
        for name, tensor in mapped.tensors.items():
            assert np.isfinite(tensor).all(), name
        tokenizer.decode(tokenizer.encode("Hello"))
        if tokenizer.chat_template is not None:
            tokenizer.chat_template.render(MESSAGES)

    with place.file(place.gguf, data):
        return judge(place.case, use, (PpsdError,))


def exit_head(place: Place, data: bytes) -> str:
    def use() -> None:
        engine, params = place.engine, SamplingParams(max_tokens=4)
        engine.use_head(place.head)
        drafted = engine.generate([5, 6, 7], params, "eesd:length=2").run()
        if drafted.ids != place.plain.generate([5, 6, 7], params, "plain").run().ids:
            raise Fault("another answer than plain decoding's")
        if not 0 <= prior(engine.head) <= 1:
            raise Fault("an acceptance that is no share")

    with place.file(place.head, data):
        outcome = judge(place.case, use, (PpsdError,))
        run_main(place, ["info", "-m", "{model}", "--exit-head", "{head}", "--threads", "1"], clean_output=True)
    return _once(data, outcome)


def prompts(place: Place, data: bytes) -> str:
    command = ["--prompts", "{prompts}", "-m", "{model}", "--exit-head", "none", "--threads", "1", "-n", "2", "--json"]
    with place.file(place.case / "prompts.jsonl", data):
        return run_main(place, command)


def shard(name: str) -> Run:
    def use(place: Place) -> None:
        for text in read_shard(place.shards, 0):
            if not 0 <= text.answer <= len(text.ids) or (text.ids < 0).any():
                raise Fault("a text that cannot be was accepted")
            for layer in text.states:
                text.after(layer)

    def run(place: Place, data: bytes) -> str:
        with place.file(place.shards / name, data):
            return judge(place.case, lambda: use(place), (PpsdError,))

    return run


def learned_numbers(place: Place, data: bytes) -> str:
    """No refusal: what is damaged counts for nothing. The policy must be able to begin with what is read."""
    path = place.cache / "damaged" / "one.json"  # a folder of its own: engines of other targets keep theirs beside
    path.parent.mkdir(parents=True, exist_ok=True)

    def use() -> None:
        alone = _native.testing.Alone(0.3, 0.5)
        alone.know(learned.read(path))
        alone.begin()
        for _ in range(20):
            drafts = alone.plan().lookahead
            alone.took("late", drafts + 1, 0.01)
            alone.learn(drafts, 0)

    with place.file(path, data):
        return judge(place.case, use, ())


def importance_files(place: Place) -> st.SearchStrategy[bytes]:
    """numpy's: the header is a Python literal after ten bytes."""
    buffer = io.BytesIO()
    np.save(buffer, np.ones((3, 128), np.float32))
    good = buffer.getvalue()
    header, values = good[10:128].decode().strip(), good[128:]

    def whole(text: str) -> bytes:
        raw = text.encode("utf-8", "surrogatepass")[:60_000]
        return good[:8] + len(raw).to_bytes(2, "little") + raw + values

    changed = texts([header], " ,:(){}'").map(whole)
    shapes = st.lists(st.sampled_from((-1, 0, 1, 3, 128, 10**7, 2**40)), max_size=3).map(
        lambda shape: whole(header.replace("(3, 128)", repr(tuple(shape))))
    )
    return mostly(changed | shapes, damaged([good]), st.sampled_from(SPECIALS))


def importance(place: Place, data: bytes) -> str:
    """No refusal here either."""
    checkpoint = Checkpoint(place.model)
    importance_for("int4", checkpoint, 1)  # finds out what the file is called
    [path] = (place.cache / "importance").iterdir()

    def use() -> None:
        found = importance_for("int4", checkpoint, 1)
        if found.shape != (3, 128) or found.dtype != np.float32 or not np.isfinite(found).all():
            raise Fault("an importance that cannot be")
        if list(path.parent.iterdir()) != [path]:
            raise Fault("a file was left behind in the cache")

    with place.file(path, data):
        return judge(place.case, use, ())


def _json_of(*names: str) -> Callable[[Place], st.SearchStrategy[bytes]]:
    return lambda place: json_files([place.json(name) for name in names])


def _bytes_of(path: Callable[[Place], Path]) -> Callable[[Place], st.SearchStrategy[bytes]]:
    return lambda place: safetensors_files([path(place).read_bytes()])


def prompt_files(place: Place) -> st.SearchStrategy[bytes]:
    lines = [json.loads(line) for line in corpus.PROMPTS.splitlines()]
    changed = json_texts(lines).map(lambda text: text.encode("utf-8", "surrogatepass"))
    many = st.lists(changed, min_size=1, max_size=3).map(b"\n".join)
    return mostly(many, damaged([corpus.PROMPTS]), st.sampled_from(SPECIALS))


SPECIAL_TOKENS = {"bos_token": {"content": "<|im_start|>"}, "additional_special_tokens": ["<|endoftext|>"]}
TEMPLATES = {"chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "tool", "template": "{{ tools }}"}]}
GENERATION = {"eos_token_id": [VOCAB - 1], "bos_token_id": VOCAB - 2, "temperature": 0.7}

# name: (strategy of inputs, what is done with one)
TARGETS = {
    "config": (lambda place: json_files(place.configs), answering("config.json")),
    "generation-config": (lambda place: json_files([GENERATION]), answering("generation_config.json")),
    "tokenizer": (_json_of("tokenizer.json"), tokenizing("tokenizer.json")),
    "tokenizer-config": (_json_of("tokenizer_config.json"), tokenizing("tokenizer_config.json")),
    "special-tokens": (lambda place: json_files([SPECIAL_TOKENS]), tokenizing("special_tokens_map.json")),
    "chat-templates": (lambda place: json_files([TEMPLATES]), tokenizing("tokenizer_config.json")),
    "chat-template": (template_sources, chat_template),
    "weights": (_bytes_of(lambda place: place.model / "model.safetensors"), weights),
    "index": (
        lambda place: json_files([json.loads((place.sharded / "model.safetensors.index.json").read_text())]),
        index,
    ),
    "gguf": (
        lambda place: mostly(
            gguf_files([place.gguf.read_bytes()]), damaged([place.gguf.read_bytes()]), st.sampled_from(SPECIALS)
        ),
        gguf,
    ),
    "exit-head": (lambda place: safetensors_files(place.heads), exit_head),
    "prompts": (prompt_files, prompts),
    "shard": (_bytes_of(lambda place: place.shards / "text-00000.safetensors"), shard("text-00000.safetensors")),
    "shard-states": (
        _bytes_of(lambda place: place.shards / "states-00000.safetensors"),
        shard("states-00000.safetensors"),
    ),
    "learned": (lambda place: json_files([learned_of(20), learned_of(0)]), learned_numbers),
    "importance": (importance_files, importance),
}
FILES = set(TARGETS) - {"chat-template"}  # whose inputs are files as they are
