"""Schedules that look further ahead than a pass takes rows: they are cut to one."""

import pytest
from support import tiny_model, write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt._native import PASS_ROWS
from ppsd_rt.generation import Committed

SEEDS = {  # so that there are long drafts
    "elastic:lookahead=200,lookup=1": range(20),
    "ppsd:lookahead=1024,lookup=1,recycle=on": range(20),
}


@pytest.mark.parametrize("schedule", SEEDS)
def test_drafts_fit_into_a_pass(tmp_path, schedule):
    folder = write_model(tmp_path / "model", tiny_model())
    engine = Engine.from_pretrained(folder, backend="cpu", exit_head="norm:3", threads=1)
    longest = 0
    for seed in SEEDS[schedule]:
        prompt = [5, 6, 7, seed % 250] * 4
        params = SamplingParams(max_tokens=300, temperature=1.0, seed=seed, ignore_eos=True)
        generation = engine.generate(prompt, params, schedule)
        rounds = [event.round for event in generation.events() if isinstance(event, Committed)]
        longest = max([longest, *(len(round.judged) + round.dropped for round in rounds)])
        assert generation.completion.ids == engine.generate(prompt, params, "plain").run().ids
    assert PASS_ROWS // 2 < longest < PASS_ROWS
