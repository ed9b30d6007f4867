"""Inputs that once did harm, or nearly: `make test-all` tries them."""

import json
from typing import Any

from support import TEMPLATE, VOCAB, tiny_config

from ppsd_rt.ranks.control import Kind

from .corpus import TEMPLATE_PIECES
from .mutations import SPECIAL
from .place import SHAPE, learned_of
from .rank_targets import control_message, wire_message

HUGE = 10**400
LEARNED = len(learned_of(20))


def _config(**changes: Any) -> bytes:
    return json.dumps({**tiny_config(), **SHAPE, **changes}).encode()


def _llama3(**changes: float) -> dict[str, Any]:
    good = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    return {"rope_type": "llama3", **good, **changes}


def _safetensors(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode()


DEEP = "[" * 100_000
LIE = "{'descr': '<f4', 'fortran_order': False, 'shape': (3000000000, 3000), }\n"

KNOWN: dict[str, list[Any]] = {
    "wire": [
        [wire_message(1, [(1, 0, 0, 3, 1)])],
        [
            wire_message(1, [(1, 0, 0, 3, 1)], opens=True),
            wire_message(2, [(1, 0, 3, 1, 1)]).replace(bytes([5, 0, 0, 0]), b"\xff" * 4),
        ],
    ],
    "control": [
        control_message(json.dumps([Kind.FAIL, text]).encode()).ljust(256, b"\0") for text in ("", "rank 1\n\x1b[31m")
    ],
    "config": [
        _config(num_hidden_layers=10_000_000),
        _config(model_type=["llama"]),
        _config(model_type={"a": 1}),
        *(_config(**{name: HUGE}) for name in ("rope_theta", "rms_norm_eps")),
        *(_config(rope_scaling={"rope_type": "linear", "factor": factor}) for factor in (HUGE, 1e-300, 1e300)),
        *(_config(rope_theta=theta) for theta in (1e-300, 1e300)),
        _config(rope_scaling=_llama3(factor=1e-300)),
        _config(rope_scaling=_llama3(low_freq_factor=1e-300, high_freq_factor=1e300)),
        _config(rope_scaling=_llama3(low_freq_factor=1.0, high_freq_factor=1.0 + 1e-16)),
        DEEP.encode(),
    ],
    "tokenizer": [SPECIAL + b"zero"],
    "tokenizer-config": [json.dumps({"chat_template": "{{ ''.__class__ }}"}).encode()],
    "chat-template": [TEMPLATE + piece for piece in TEMPLATE_PIECES],
    "weights": [_safetensors('{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": 1}')],
    "learned": [
        *(
            json.dumps([value] * len(learned_of(20))).encode()
            for value in (0, "x", None, float("nan"), HUGE, -1.0, True, 1e300)
        ),
        *(text.encode() for text in (DEEP, "{}", "null", "[1]", "[]", "[{}]", "3")),
    ],
    "importance": [
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(4096)
        for header in (LIE, LIE.replace("(3000000000, 3000)", "(-1,)"), DEEP[:30_000], "{'descr': " + DEEP[:900])
    ],
    "exit-head": [
        _safetensors(json.dumps({"__metadata__": {"format": "ppsd-exit-head-1", "recipe": DEEP, "acceptance": "{}"}}))
    ],
    "exit-head-name": ["norm:1:100000000000", "norm:" + "9" * 5000, "norm:1:" + "9" * 5000],
    "schedule": [
        "eesd:length=4,stop_rule=confidence=0.5111111",
        *(f"{name}={'9' * digits}" for name in ("eesd:length", "auto:lookup", "plain:lookup") for digits in (20, 5000)),
        "elastic:lookahead=3000000000",
        "eesd:stop_rule=confidence=nan",
    ],
    "sampling": [json.dumps({"stop_token_ids": [id]}) for id in (-1, 2**31, HUGE % 10**300)],
    "device": ["cuda:128", "cuda:00", "cuda:" + "9" * 20, "cuda:" + "9" * 5000, "cpu:0," + "cpu:" + "9" * 5000],
    "world": [
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "x"},
        {"RANK": "0", "WORLD_SIZE": "9" * 5000},
    ],
    "prompts": [
        b'{"id": "a\\nb", "prompt": ""}',
        b'{"id": "a\\u0000b", "prompt": ""}',
        b'{"id": "\\u001b[31m", "prompt": "\\ud800"}',
        DEEP.encode(),
    ],
    "prompt": [DEEP, "[" + "9" * 400 + "]", "[-1]", f"[{VOCAB}]", "[true]", "[]", '""', "{}"],
    "command-line": [
        ["-m", "{model}", "--threads", "64", "-n", "2", "Hello"],
        ["-m", "{model}", "--threads", "1024", "-n", "2", "Hello"],
        ["-m", "{model}", "--threads", "1", "-n", "2", "--exit-head", "a\nb", "Hello"],
        ["-m", "{missing}", "--threads", "1", "--trace", "{existing}", "Hello"],
        ["heads", "none", "-m", "{model}", "--threads", "1", "--prompts", "{prompts}", "--plot", "{existing}.svg"],
        ["lab", "simulate", "--stages", "9", "--stage-ms", "1,1", "--save", "{out}"],
        ["info", "-m", "{model}", "--stages", "9" * 5000],
        ["chatt"],
    ],
}
