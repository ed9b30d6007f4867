"""Target: sequences of calls on one engine; every answer must be what a fresh plain one is."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from toys import schedules

from ppsd_rt import Grammar, PpsdError, SamplingParams
from ppsd_rt.backend import RunOptions
from ppsd_rt.generation import Committed, Completion, Generation
from ppsd_rt.pipeline.schedule import describe

from .oracle import Fault, bounded_memory, no_warnings
from .place import Place

TEXT = [7, 8, 9, 7, 8, 9, 7, 8, 20, 21, 7, 8, 9, 30, 31, 32, 33, 7, 8, 9]
HEADS = ("none", "norm:1", "norm:2", "norm:1:50")
SCHEDULES = (
    *("plain", "auto", "lookup", "auto:lookup=0,recycle=off", "eesd", "ppsd", "elastic"),
    *("eesd:length=3,stop_rule=fixed", "elastic:first_chunk=0,max_chunk=15", "ppsd:lookahead=2", "eesd:lookup=2"),
    *("eesd:stop_rule=confidence=0.1", "elastic:stop_rule=calibrated,lookup=1", "eesd:stop_rule=survival"),
)
PARAMS = (
    {},
    {"max_tokens": 1},
    {"ignore_eos": True, "max_tokens": 60},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 6},
    {"repetition_penalty": 0.5, "max_tokens": 30},
    {"ignore_eos": True, "max_tokens": 200, "temperature": 0.5, "seed": 8},  # longer than a pass
    {"min_tokens": 9, "logit_bias": {20: 20.0}, "stop_token_ids": (20,), "temperature": 1.0, "seed": 9},
    {"stop_token_ids": (135, 20), "stop": ("A",)},
    {"grammar": Grammar.regex("([a-z]{2,5} )+"), "temperature": 1.0, "max_tokens": 40},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 3, "max_tokens": 30},
    {"temperature": 0.9, "logit_bias": {9: 3.0, 20: -100.0}, "logprobs": 0, "seed": 7},
)


def steps(place: Place) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """(what, ...): begin (prompt's length, its last id, schedule, params, report drafts), and then by the number of an
    answer: advance (so many events), run, close, drop; head (name); logits (length)."""
    which = st.integers(0, 3)
    begin = st.tuples(
        st.just("begin"),
        st.integers(1, len(TEXT)),
        st.integers(0, 60),
        st.one_of(st.sampled_from(SCHEDULES), schedules.map(describe)),  # any that there is
        st.integers(0, len(PARAMS) - 1),
        st.booleans(),
    )
    return st.lists(
        st.one_of(
            begin,
            begin,
            st.tuples(st.just("advance"), which, st.integers(1, 6)),
            st.tuples(st.just("advance"), which, st.integers(1, 6)),
            st.tuples(st.sampled_from(("run", "close", "drop")), which),
            st.tuples(st.just("head"), st.sampled_from(HEADS)),
            st.tuples(st.just("logits"), st.integers(1, len(TEXT))),
        ),
        min_size=1,
        max_size=16,
    )


class _Answer:
    """One in the making, and what it has to be."""

    def __init__(self, generation: Generation, expected: Completion) -> None:
        self.generation, self.expected = generation, expected
        self.ids: list[int] = []
        self.over = self.cut = False  # no more events; ended before its end
        self.stale = False  # the exit head was changed since: it may refuse to go on, for whatever reason

    def advance(self, events: int) -> bool:
        """Whether this answer may still be going on. Its tokens are the expected ones, as far as it gets."""
        try:
            for _, event in zip(range(events), self.generation.events(), strict=False):
                if isinstance(event, Committed):
                    self.ids += [token.id for token in event.tokens]
        except PpsdError as error:
            if not self.stale and "this generation was ended" not in str(error):
                raise
            self.over = self.cut = True
        self.check()
        return not self.over

    def check(self) -> None:
        if tuple(self.ids) != self.expected.ids[: len(self.ids)]:
            raise Fault(f"another answer than plain decoding's, after {len(self.ids)} tokens")

    def finish(self) -> None:
        if self.advance(10_000) and not self.cut:
            found = self.generation.completion
            for name in ("ids", "text", "finish_reason"):
                if getattr(found, name) != getattr(self.expected, name):
                    raise Fault(f"another {name} than plain decoding's")
        self.over = True


def calls(place: Place, steps: Sequence[tuple[Any, ...]]) -> str:
    with no_warnings(), bounded_memory():
        return _play(place, steps)


def _play(place: Place, steps: Sequence[tuple[Any, ...]]) -> str:
    engine, plain = place.engine, place.plain
    engine.use_head("norm:1")
    answers: list[_Answer] = []
    done = set()
    for what, *rest in steps:
        if what == "begin":
            length, last, schedule, number, report = rest
            prompt, params = [*TEXT[: length - 1], last], SamplingParams(**{"max_tokens": 12, **PARAMS[number]})
            expected = plain.generate(prompt, params, "plain").run()
            try:
                generation = engine.generate(prompt, params, schedule, RunOptions(report_drafts=report))
            except PpsdError as error:
                if engine.head is not None or "has no exit head" not in str(error):
                    raise
                continue
            answers.append(_Answer(generation, expected))
        elif what == "head":
            engine.use_head(rest[0])
            for answer in answers:
                answer.stale = True
        elif what == "logits":
            engine.backend.logits(TEXT[: rest[0]])
        elif rest[0] < len(answers):
            answer = answers[-1 - rest[0]]
            if what == "advance":
                answer.advance(rest[1])
            elif what == "run":
                answer.finish()
            elif what == "close":
                answer.generation.close()
                answer.over = answer.cut = True
                if answer.generation.completion.ids != answer.expected.ids[: len(answer.generation.completion.ids)]:
                    raise Fault("a closed answer has other tokens")
            else:
                answers.remove(answer)
        done.add(what)
    for answer in answers[-2:]:
        answer.finish()
    return f"{len(answers)} answers, {'+'.join(sorted(done))}"


TARGETS = {"calls": (steps, calls)}
