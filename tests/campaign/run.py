"""Runs a case: decodes its texts plainly on one engine, answers them with all schedules on another, and compares."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from ppsd_rt.bench.cli.check import departure
from ppsd_rt.bench.kernels import chosen_isa
from ppsd_rt.cpu.backend import CpuBackend
from ppsd_rt.engine import Engine
from ppsd_rt.generation import Completion
from ppsd_rt.pipeline.schedule import PLAIN, Auto, describe

from .draw import Answer, Case, Setup, Text
from .play import Played, play

_RANGES = ((0, "0"), (15, "1 to 15"), (127, "16 to 127"), (1023, "128 to 1023"))

Tally = dict[str, dict[str, list[int]]]  # dimension -> value -> [answers, tokens, differences]


@dataclass
class Outcome:
    """What a case gave. tokens: committed by answers that were not plain. plain_tokens: of those that they were
    compared with. passes: verification passes by "drafts judged/accepted".
    """

    case: int
    tokens: int = 0
    plain_tokens: int = 0
    answers: int = 0
    seconds: float = 0.0
    tally: Tally = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    differences: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Pair:
    """The engine under test, and the one that decodes plainly; use_head gives it a new, empty KV cache."""

    tested: Engine
    reference: Engine


def load_pair(model: str, setup: Setup) -> Pair:
    same = ("exit_head", "dtype", "threads", "stages", "kv_dtype", "kv_memory")
    with chosen_isa(setup.isa):
        tested = Engine.from_pretrained(model, backend="cpu", **{name: getattr(setup, name) for name in same})
        assert isinstance(tested.backend, CpuBackend)
        beside = tested.backend.beside(setup.reference_threads)
    return Pair(tested, Engine(tested.checkpoint, tested.tokenizer, beside, tested.name))


def run_case(case: Case, pair: Pair, tell: Callable[[str], None]) -> Outcome:
    """tell: of every difference, at once."""
    began = perf_counter()
    outcome = Outcome(case.number)
    prompts: list[list[int]] = []
    plain: list[Completion] = []
    for text in case.texts:
        prompts.append(_prompt(text, prompts, plain, pair.tested.config.max_position_embeddings))
        pair.reference.use_head("none")
        plain.append(pair.reference.generate(prompts[-1], text.params, PLAIN).run())
        outcome.plain_tokens += len(plain[-1].ids)
    for played in play(case, pair.tested, prompts, plain):
        answer, done = played.answer, played.completion
        prompt, truth = prompts[answer.text], plain[answer.text]
        same = _same(done, truth, played.whole)
        values = _dimensions(case, played, pair, prompt)
        for dimension, value in values:
            if answer.kind != "plain" or dimension == "schedule":
                counts = outcome.tally.setdefault(dimension, {}).setdefault(value, [0, 0, 0])
                counts[0] += 1
                counts[1] += len(done.ids)
                counts[2] += not same
        for key, count in played.passes.items():
            outcome.passes[key] = outcome.passes.get(key, 0) + count
        outcome.answers += 1
        outcome.tokens += len(done.ids) * (answer.kind != "plain")
        if not same:
            found = _difference(case, answer, pair, prompt, truth, done, dict(values))
            outcome.differences.append(found)
            tell(describe_difference(found))
    outcome.seconds = perf_counter() - began
    return outcome


def _prompt(text: Text, prompts: list[list[int]], plain: list[Completion], context: int) -> list[int]:
    """With room for an answer; at least one id."""
    ids = list(text.ids)
    if text.after is not None:
        earlier, answer = prompts[text.after], plain[text.after].ids
        if text.kept < 0:
            ids = earlier[: len(earlier) // 2] + ids
        else:
            ids = [*earlier, *answer[: round(text.kept * len(answer))], *ids]
    return ids if text.kind == "whole context" else ids[: context * 3 // 4]


def _same(done: Completion, truth: Completion, whole: bool) -> bool:
    if not whole:
        begins = done.ids == truth.ids[: len(done.ids)] and done.logprobs == truth.logprobs[: len(done.ids)]
        return begins and len(done.ids) < len(truth.ids)
    same = (done.ids, done.logprobs) == (truth.ids, truth.logprobs)
    return same and (done.text, done.finish_reason) == (truth.text, truth.finish_reason)


def _dimensions(case: Case, played: Played, pair: Pair, prompt: list[int]) -> list[tuple[str, str]]:
    """What the answer is counted under; `filters` several times."""
    answer = played.answer
    backend, schedule, text = pair.tested.backend, answer.schedule, case.texts[answer.text]
    setup, params = case.setup, text.params
    engine = {
        "isa": str(backend.facts().get("isa", "-")),
        "format": backend.dtype,
        "KV format": str(backend.facts().get("kv_dtype", backend.dtype)),
        "threads": str(backend.threads),
    }
    if setup is not None:
        engine |= {
            "exit head": setup.exit_head.partition(":")[0],
            "threads, plain": str(setup.reference_threads),
            "stages": str(setup.stages),
            "memory for KV caches": "as is spare" if setup.kv_memory is None else "scarce",
        }
    fixed = None if isinstance(schedule, Auto) or answer.kind == "plain" else schedule
    filters = params.extras()
    filters += ["stop"] if params.stop else []
    return [
        ("schedule", answer.kind),
        ("stop rule", fixed.stop_rule.kind if fixed else "-"),
        ("longest draft", str(fixed.max_chunk) if fixed else "-"),
        ("copies", "yes" if schedule.copies else "no"),
        ("drafts", "exit head's" if answer.acceptance is None else "oracle's"),
        ("sampling", "temperature" if params.temperature else "greedy"),
        *[("filters", name) for name in filters or ["none"]],
        *engine.items(),
        ("prompt", text.kind),
        ("prompt tokens", _range(len(prompt))),
        ("prompt tokens held", "-" if played.shared is None else _range(played.shared)),
        ("answer", "whole" if played.whole else "abandoned"),
        ("before it", "an open answer" if played.after_open else "a closed answer" if case.at_once == 1 else "-"),
        ("at once", _at_once(case.at_once)),
    ]


def _at_once(answers: int) -> str:
    return next((name for most, name in ((1, "1"), (4, "2 to 4"), (16, "5 to 16")) if answers <= most), "17 or more")


def _range(count: int) -> str:
    return next((name for most, name in _RANGES if count <= most), "1024 or more")


def _difference(
    case: Case,
    answer: Answer,
    pair: Pair,
    prompt: list[int],
    truth: Completion,
    done: Completion,
    values: dict[str, str],
) -> dict[str, Any]:
    place, ids, logits = departure(pair.reference, prompt, truth.ids, done.ids)
    return {
        "case": case.number,
        "answer": case.answers.index(answer),
        "setup": asdict(case.setup) if case.setup else values,
        "prompt": {"kind": values["prompt"], "tokens": len(prompt), "end": pair.tested.tokenizer.decode(prompt[-40:])},
        "sampling": asdict(case.texts[answer.text].params),
        "schedule": describe(answer.schedule),
        "oracle": answer.acceptance,
        "abandoned_after": answer.events,
        "at_once": case.at_once,
        "before": [describe(earlier.schedule) for earlier in case.answers[: case.answers.index(answer)]][-3:],
        "position": place,
        "ids": ids,
        "logits": logits,
        "finish": [truth.finish_reason, done.finish_reason],
    }


def describe_difference(found: dict[str, Any]) -> str:
    """Two lines for people: where, and with what."""
    (plain, id), (plain_logit, logit), (plain_finish, finish) = found["ids"], found["logits"], found["finish"]
    prompt, setup = found["prompt"], ", ".join(f"{key} {value}" for key, value in found["setup"].items())
    before = ", ".join(found["before"]) or "none"
    others = f"answers before it on this engine: {before}" if found["at_once"] == 1 else f"{found['at_once']} at once"
    return (
        f"case {found['case']}, answer {found['answer']}: {found['schedule']}, oracle {found['oracle']}: at token "
        f"{found['position']} plain decoding gives {plain} (logit {plain_logit}, ends by {plain_finish}), this "
        f"schedule {id} (logit {logit}, ends by {finish})\n"
        f"  {setup}\n  {found['sampling']}\n"
        f"  prompt: {prompt['kind']}, {prompt['tokens']} tokens, ending in {prompt['end']!r}\n"
        f"  {others}"
    )
