"""What an exit head says of its drafts, and what those of the default model's cost."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ppsd_rt import Engine, SamplingParams
from ppsd_rt._native import StageCosts
from ppsd_rt.lab.cli.prompt_files import read_prompts
from ppsd_rt.pipeline.schedule import MAX_CHUNK

from .lengths_replay import Text

CALIBRATION = Path(__file__).parents[1] / "results" / "2026-11-21-amd-epyc-2-calibration.jsonl"
TOKENS = 128  # of an answer, at most
LONGEST = f"eesd:length={MAX_CHUNK},stop_rule=fixed"


@cache
def engine() -> Engine:
    return Engine.from_pretrained("smollm2-135m", backend="cpu", threads=1)


def recorded(temperature: float, prompts: int) -> Text:
    """Of the default model with its head, on the development prompts."""
    asked = [engine().encode([{"role": "user", "content": p.prompt}]) for p in read_prompts(None)[:prompts]]
    return texts_of(engine(), asked, TOKENS, temperature)


@cache
def recorded_answers(temperature: float, prompts: int) -> list[Text]:
    """The same, each answer a text."""
    asked = [engine().encode([{"role": "user", "content": p.prompt}]) for p in read_prompts(None)[:prompts]]
    return [texts_of(engine(), [prompt], TOKENS, temperature) for prompt in asked]


def texts_of(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, temperature: float = 0.0) -> Text:
    """Was a draft right, and how sure was the head? Of nearly every position of the answers: rounds of 15 drafts have
    each judged up to the first wrong one, which the next round begins after."""
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1)
    right, confidence = [], []
    for prompt in prompts:
        for event in engine.generate(prompt, params, LONGEST).events():
            round = getattr(event, "round", None)
            for place, draft in enumerate(round.judged if round else ()):
                right.append(place < round.accepted)
                confidence.append(draft.confidence)
    return Text(tuple(right), tuple(confidence))


def calibrated_costs() -> StageCosts:
    """Of a quiet machine: a kept calibration of this model in int8 on two threads."""
    for line in CALIBRATION.read_text(encoding="utf-8").splitlines():
        kept = json.loads(line)
        if (kept["dtype"], kept["threads"]) == ("int8", 2):
            turns = kept["turns"]
            return StageCosts(turns["row_step"], turns["draft_step"], turns["verify"])
    raise ValueError(f"{CALIBRATION} has no calibration of int8 on two threads")
