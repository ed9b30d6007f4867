"""What an exit head says of its drafts, and what those of the default model's cost."""

import json
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
    """Was a draft right, and how sure was the head? Of the default model with its head, on the development prompts.

    Of nearly every position: rounds of 15 drafts have each judged up to the first wrong one; the next begins after it.
    """
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=1)
    right, confidence = [], []
    for prompt in read_prompts(None)[:prompts]:
        ids = engine().encode([{"role": "user", "content": prompt.prompt}])
        for event in engine().generate(ids, params, LONGEST).events():
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
