"""Targets: texts and values that options and the Python API take."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from ppsd_rt import Grammar, PpsdError, SamplingParams
from ppsd_rt.pipeline.schedule import describe, parse_schedule
from ppsd_rt.ranks.world import find_world

from .corpus import DEVICES, EXIT_HEADS, SCHEDULES
from .file_targets import MESSAGES
from .mutations import json_texts, nasty_text, texts
from .oracle import Fault, judge
from .place import Place

FIELDS = {field.name for field in fields(SamplingParams)}
SAMPLING = [
    {"max_tokens": 4, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
    {
        "max_tokens": 9,
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "seed": 6,
    },
    {"max_tokens": 20, "grammar": {"type": "regex", "regex": "[a-c]{2,9}( [0-9]+)*"}, "temperature": 1.0},
    {"grammar": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "required": ["a"]}}}},
    {"grammar": {"type": "lark", "lark": 'start: "a" | "b" start'}, "max_tokens": 9},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5, "logit_bias": {3: -100, 5: 2.5}, "logprobs": 2},
    {"max_tokens": 9, "stop": ["a", "bc"], "stop_token_ids": [1, 2], "ignore_eos": True, "seed": 7},
]
PROMPTS = [[1, 2, 3], "Hello", MESSAGES, [{"role": "user", "content": "Hi"}]]


def schedule(place: Place, text: str) -> str:
    """What is understood is described by a text that means the same, and gives plain decoding's answer."""

    def use() -> None:
        parsed = parse_schedule(text)
        if parse_schedule(describe(parsed)) != parsed:
            raise Fault(f"{describe(parsed)} does not describe the schedule")
        place.engine.use_head("norm:1")
        for params in (SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, temperature=1.0, seed=5)):
            answer = place.engine.generate([5, 6, 7], params, parsed).run()
            if answer.ids != place.plain.generate([5, 6, 7], params, "plain").run().ids:
                raise Fault("another answer than plain decoding's")

    return judge(place.case, use, (PpsdError,))


def device(place: Place, text: str) -> str:
    return judge(place.case, lambda: place.load(device=text, backend="auto", dtype="auto"), (PpsdError,))


def exit_head_name(place: Place, text: str) -> str:
    name = text.replace("{model}", str(place.model)).replace("{gguf}", str(place.gguf))

    def use() -> None:
        place.engine.use_head(name)
        schedule = "plain" if place.engine.head is None else "eesd:length=2"
        place.engine.generate([5, 6, 7], SamplingParams(max_tokens=3), schedule).run()

    return judge(place.case, use, (PpsdError,))


def _value(text: str) -> Any:
    """What JSON can say; None where it says nothing."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def sampling(place: Place, text: str) -> str:
    values = _value(text)
    if not isinstance(values, dict):
        return "no values"

    def use() -> None:
        given = {name: value for name, value in values.items() if name in FIELDS}
        if given.get("grammar") is not None:
            given["grammar"] = Grammar.from_response_format(given["grammar"])
        params = SamplingParams(**given)
        generation = place.engine.generate([5, 6, 7], params, "lookup")
        for _ in zip(range(4), generation.events(), strict=False):
            pass
        generation.close()

    return judge(place.case, use, (PpsdError,))


def prompt(place: Place, text: str) -> str:
    def use() -> None:
        ids = place.engine.encode(_value(text))
        place.engine.generate(ids, SamplingParams(max_tokens=2), "plain").run()

    return judge(place.case, use, (PpsdError,))


def worlds(place: Place) -> st.SearchStrategy[dict[str, str]]:
    """What torchrun puts into the environment."""
    good = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    numbers = st.integers(-2, 5).map(str)
    return st.fixed_dictionaries(
        {}, optional={name: st.just(value) | numbers | nasty_text() for name, value in good.items()}
    )


def world(place: Place, environment: Mapping[str, str]) -> str:
    def use() -> None:
        found = find_world(environment)
        if found is not None:
            fits = 0 <= found.rank < found.size and 0 <= found.local_rank < found.local_size <= found.size
            if not fits:
                raise Fault(f"a rank that cannot be was accepted: {found}")

    return judge(place.case, use, (PpsdError,))


TARGETS = {
    "schedule": (lambda place: texts(SCHEDULES, ":,="), schedule),
    "device": (lambda place: texts(DEVICES, ":,"), device),
    "exit-head-name": (lambda place: texts(EXIT_HEADS, ":"), exit_head_name),
    "sampling": (lambda place: json_texts(SAMPLING), sampling),
    "prompt": (lambda place: json_texts(PROMPTS), prompt),
    "world": (worlds, world),
}
