"""The cases of a campaign: a case depends on the campaign's seed, the case's number and the material, on nothing else.

A case is one engine, some texts (a prompt and sampling parameters, each with a plain answer to compare with), and
answers to them on that engine. They follow each other, so that they find each other's rows in the KV cache, or several
are decoded at once.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

from ppsd_rt.pipeline.schedule import LOOKUP, MAX_CHUNK, MOST_LOOKAHEAD, MOST_LOOKUP, PLAIN, Auto, Schedule
from ppsd_rt.pipeline.stop_rules import (
    BetaThompson,
    CalibratedThompson,
    ConfidenceThreshold,
    FixedLength,
    Paying,
    StopRule,
    Survival,
)
from ppsd_rt.sampling.grammar import Grammar
from ppsd_rt.sampling.params import MOST_LOGPROBS, SamplingParams

CASE_TOKENS = 6000  # of a fast engine's case, about; slow ones get a share
ANSWERS = 9  # to a text, about: the plain answer is decoded once for all of them
MOST_PROMPT = 1000  # tokens, but for texts that fill the context
NEAR_LOOKAHEAD = 20  # what is in use; more is drawn less often
_SLOW = {"portable": 0.05, "float32": 0.4, "bfloat16": 0.5}
_GIVEN = 0.25  # the share of an engine that is not drawn
_GRAMMARS = (
    Grammar.json(),
    Grammar.json_schema({"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 9}),
    Grammar.regex("([A-Z]?[a-z]{1,9}[ ,.]){20,}"),
    Grammar.lark('start: line+\nline: /[a-z ]{0,30}/ ("=" | "->") /[0-9]+/ "\\n"'),
)

T = TypeVar("T")


@dataclass(frozen=True)
class Material:
    """What cases are drawn from.

    questions, text: as ids. isas to stages: what a `Setup` is drawn from, by weight. head: an exit head, `auto` for
    any; exit_layer: after which it drafts, of `auto` the shipped one; None: there is none. engine: False where the
    engine is given (ranks, backends other than cpu). most_at_once: answers that an engine decodes side by side.
    row_bytes: of a KV cache, for a token in the widest format. copies: can it draft them? overlaps:
    may it draft while it verifies? extras: does it know `SamplingParams.extras`? grammars: is llguidance there, which
    grammars need?
    """

    questions: tuple[tuple[int, ...], ...]
    text: tuple[int, ...]
    vocabulary: int
    context: int
    layers: int
    isas: dict[str, float]
    dtypes: dict[str, float]
    kv_dtypes: dict[str, float]
    threads: dict[int, float]
    stages: dict[int, float]
    head: str
    exit_layer: int | None
    engine: bool = True
    most_at_once: int = 1
    row_bytes: int = 0
    copies: bool = True
    overlaps: bool = True
    extras: bool = True
    grammars: bool = True


@dataclass(frozen=True)
class Setup:
    """An engine of the cpu backend. reference_threads: of the one that decodes plainly, for comparison.

    kv_memory: in bytes, so little that answers wait for each other and lose their places; None: what there is to spare.
    """

    isa: str
    dtype: str
    kv_dtype: str
    exit_head: str
    threads: int
    reference_threads: int
    stages: int
    kv_memory: int | None = None

    @property
    def share(self) -> float:
        """Of CASE_TOKENS: what a case costs in time shall not depend too much on its engine."""
        return _SLOW.get(self.isa, 1.0) * _SLOW.get(self.dtype, 1.0)


@dataclass(frozen=True)
class Text:
    """ids: the prompt; with `after`, what follows the prompt of that earlier text and the first `kept` of its answer.

    kept: a share of the answer's tokens; -1: not even the whole prompt, but half of it.
    """

    kind: str
    ids: tuple[int, ...]
    params: SamplingParams
    after: int | None = None
    kept: float = 1.0


@dataclass(frozen=True)
class Answer:
    """An answer to text number `text`.

    acceptance: of an oracle that drafts; None: the exit head drafts. events: the answer is abandoned after so many;
    None: never. closed: when abandoned, it is ended by `close`; else by the next answer, or among others by `cancel`.
    """

    text: int
    kind: str
    schedule: Schedule | Auto
    acceptance: float | None
    oracle_seed: int
    events: int | None
    closed: bool


@dataclass(frozen=True)
class Case:
    """at_once: answers that are decoded side by side."""

    number: int
    setup: Setup | None
    texts: tuple[Text, ...]
    answers: tuple[Answer, ...]
    at_once: int = 1


def draw_case(material: Material, seed: int, number: int) -> Case:
    rng = Random(f"{seed}/{number}")
    setup = _setup(rng, material) if material.engine else None
    at_once = 1 if material.most_at_once == 1 or rng.random() < 0.3 else _long(rng, 2, material.most_at_once)
    drafts = material.exit_layer is not None if setup is None else setup.exit_head != "none"
    share = setup.share if setup else _GIVEN
    texts: list[Text] = []
    while ANSWERS * sum(text.params.max_tokens or 0 for text in texts) < share * CASE_TOKENS:
        texts.append(_text(rng, material, texts, share))
    answers = [_answer(rng, material, drafts, number) for number in range(len(texts)) for _ in range(ANSWERS)]
    if all(text.kind != "whole context" for text in texts) and rng.random() < 0.5:
        rng.shuffle(answers)
    if at_once > 1:
        answers = [replace(answer, acceptance=None) for answer in answers]  # oracles are for an answer alone
        if setup is not None and rng.random() < 0.6:
            longest = max(_most_tokens(texts)) + 64  # a block more than fits in any case
            setup = replace(setup, kv_memory=int(longest * material.row_bytes * (1.5 + rng.expovariate(0.5))))
    return Case(number, setup, tuple(texts), tuple(answers), at_once)


def _setup(rng: Random, material: Material) -> Setup:
    head, exit_layer = _head(rng, material)
    return Setup(
        isa=_weighted(rng, material.isas),
        dtype=_weighted(rng, material.dtypes),
        kv_dtype=_weighted(rng, material.kv_dtypes),
        exit_head=head,
        threads=_weighted(rng, material.threads),
        reference_threads=_weighted(rng, material.threads),
        stages=min(_weighted(rng, material.stages), material.layers - (exit_layer or 0)),
    )


def _head(rng: Random, material: Material) -> tuple[str, int | None]:
    """An exit head's name, and after which layer it drafts."""
    if material.head != "auto":
        return material.head, material.exit_layer
    chance = rng.random()
    if chance < 0.05:
        return "none", None
    if chance < 0.8 and material.exit_layer is not None:
        return "auto", material.exit_layer
    layer = _long(rng, 1, material.layers - 1)  # a draft after a late layer costs what a plain token does
    some = rng.choice(("", f":{_long(rng, 1, material.vocabulary)}"))
    return f"norm:{layer}{some}", layer


def _text(rng: Random, material: Material, earlier: list[Text], share: float) -> Text:
    most = min(300, int(share * CASE_TOKENS / ANSWERS) + 8, material.context // 4)
    params = _sampling(rng, _long(rng, min(8, most), most))
    if material.extras:
        params = _with_extras(params, material)
    else:
        params = replace(params, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    kinds = {"question": 4.0, "cut": 3.0, "repeated": 1.5}
    if earlier:
        kinds |= {"turn": 2.0, "continued": 2.0, "edited": 2.0}
    elif share == 1:
        kinds["whole context"] = 0.1
    kind = _weighted(rng, kinds)
    longest = max(min(int(share * MOST_PROMPT), material.context // 2), 8)
    if kind == "whole context":
        times = material.context // len(material.text) + 1
        return Text(kind, (material.text * times)[: material.context - rng.randint(1, 60)], params)
    if kind in ("question", "turn"):
        ids = rng.choice(material.questions)
    else:
        ids = _cut(rng, material.text, longest)
    if kind == "repeated":
        ids = (ids[: longest // 3] * 3)[rng.randint(0, 2) :]
    if kind in ("turn", "continued", "edited"):
        kept = {"turn": 1.0, "continued": rng.random(), "edited": -1.0}[kind]
        new = ids if kind != "continued" else ids[: rng.randint(0, 3)]
        return Text(kind, new, params, rng.randrange(len(earlier)), kept)
    return Text(kind, ids, params)


def _most_tokens(texts: list[Text]) -> list[int]:
    """Of each text, with its answer."""
    most: list[int] = []
    for text in texts:
        most.append(len(text.ids) + (text.params.max_tokens or 0) + (0 if text.after is None else most[text.after]))
    return most


def _cut(rng: Random, text: tuple[int, ...], longest: int) -> tuple[int, ...]:
    count = _long(rng, 1, min(longest, len(text)))
    begin = rng.randint(0, len(text) - count)
    return text[begin : begin + count]


def _sampling(rng: Random, max_tokens: int) -> SamplingParams:
    greedy = rng.random() < 0.4
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else round(rng.uniform(0.2, 1.5), 2),
        top_k=0 if greedy or rng.random() < 0.6 else _long(rng, 1, 500),
        top_p=1.0 if greedy or rng.random() < 0.6 else round(rng.uniform(0.3, 0.99), 2),
        min_p=0.0 if greedy or rng.random() < 0.7 else round(rng.uniform(0.005, 0.3), 3),
        repetition_penalty=1.0 if rng.random() < 0.7 else round(rng.uniform(0.8, 1.5), 2),
        seed=rng.randrange(2**64),
        stop=(rng.choice((".", "\n\n", " the", "e")),) if rng.random() < 0.05 else (),
        ignore_eos=rng.random() < 0.6,
    )


def _with_extras(params: SamplingParams, material: Material) -> SamplingParams:
    rng = Random(params.seed)  # what else is drawn does not depend on them
    ids = rng.sample(range(material.vocabulary), min(material.vocabulary, _long(rng, 1, 200)))
    params = replace(
        params,
        presence_penalty=0.0 if rng.random() < 0.8 else round(rng.uniform(-2, 2), 2),
        frequency_penalty=0.0 if rng.random() < 0.8 else round(rng.uniform(-2, 2), 2),
        logit_bias={} if rng.random() < 0.85 else {id: round(rng.uniform(-20, 8), 2) for id in ids},
        logprobs=None if rng.random() < 0.8 else rng.randint(0, MOST_LOGPROBS),
    )
    if material.grammars and rng.random() < 0.12:
        params = replace(params, grammar=rng.choice(_GRAMMARS), ignore_eos=False)
    return params


def _answer(rng: Random, material: Material, drafts: bool, text: int) -> Answer:
    kind, schedule = draw_schedule(rng, drafts, material.copies, material.overlaps)
    oracle = schedule.drafts and rng.random() < 0.75
    high = 1 - rng.random() / 8  # mostly: a long draft that is thrown away costs more than plain decoding
    return Answer(
        text,
        kind,
        schedule,
        acceptance=rng.choice((0.0, rng.random(), rng.random(), 1.0, high, high, high, high)) if oracle else None,
        oracle_seed=rng.randrange(2**48),
        events=_long(rng, 1, 60) if rng.random() < 0.12 else None,
        closed=rng.random() < 0.5,
    )


def draw_schedule(rng: Random, drafts: bool, copies: bool, overlaps: bool = True) -> tuple[str, Schedule | Auto]:
    """Its kind and itself: any that the documentation allows and the parts that there are can run."""
    kinds = {"plain": 1.0, "lookup": 2.0 * copies}
    if drafts:
        kinds |= {"eesd": 7.0, "ppsd": 2.0 * overlaps, "elastic": 4.0 * overlaps, "auto": 3.0}
    kind = _weighted(rng, kinds)
    lookup = rng.choice((0, 0, 0, 1, 2, LOOKUP, MOST_LOOKUP)) if copies else 0
    recycle = copies and rng.random() < 0.4
    chunk = rng.randint(1, MAX_CHUNK)
    if kind == "auto":
        return kind, Auto(lookup, recycle)
    if kind == "plain":
        return kind, PLAIN
    if kind == "lookup":
        least = 0 if recycle else 1
        lookup = rng.randint(least, MOST_LOOKUP)
        return kind, Schedule(0, chunk, 0, rng.random() < 0.3 * overlaps, _stop_rule(rng), lookup, recycle=recycle)
    if kind == "ppsd":
        ahead = _lookahead(rng, 1)
        return kind, Schedule(0, 1, ahead, True, _stop_rule(rng), lookup, recycle)
    if kind == "eesd" and rng.random() < 0.6:
        first = ahead = chunk
    else:
        first = rng.randint(0, chunk)
        ahead = _lookahead(rng, max(first, 1))
    return kind, Schedule(first, chunk, ahead, kind == "elastic", _stop_rule(rng), lookup, recycle)


def _lookahead(rng: Random, least: int) -> int:
    return _long(rng, least, MOST_LOOKAHEAD) if rng.random() < 0.3 else rng.randint(least, max(least, NEAR_LOOKAHEAD))


def _stop_rule(rng: Random) -> StopRule:
    threshold = round(rng.uniform(0.02, 0.95), 2)
    learning = BetaThompson(), CalibratedThompson(), Survival(threshold), Paying(_long(rng, 1, 10_000) / 1000)
    return rng.choice((FixedLength(), ConfidenceThreshold(threshold), *learning))


def _long(rng: Random, least: int, most: int) -> int:
    """Every order of magnitude is as likely as another."""
    return min(int(least * (((most + 1) / least) ** rng.random())), most)


def _weighted(rng: Random, weights: dict[T, float]) -> T:
    return rng.choices(list(weights), list(weights.values()))[0]
