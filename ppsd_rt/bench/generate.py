"""Whole answers: the speed of the prompt and of decoding, plainly and with every schedule, side by side.

A *workload* is the prompts of one case. A *setting* is an engine (format, threads) with a workload and a number of
tokens; all schedules of a setting give the same answers (which is checked), and their speed is compared with plain
decoding in the same repeat: prompt by prompt they take turns, so that what slows the machine down slows all of them.
The bench never measures what the answers before would save: neither a KV cache that is left over, nor what `recycle`
has counted in them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

from ..backend import Oracle, RunOptions, kv_dtype_of
from ..engine import Engine
from ..errors import UsageError
from ..pipeline.schedule import PLAIN, Auto, Schedule
from ..sampling.params import SamplingParams
from ..statistics import Statistics
from .report import Report, columns, medians
from .spread import Bandwidth, Spread, take_turns

COLUMNS = columns(
    schedule="schedule", oracle="oracle|2", dtype="dtype", kv_dtype="KV", threads="threads", workload="prompt",
    max_tokens="tokens", prompt_tokens_per_second="prompt tok/s|0", decode_tokens_per_second="decode tok/s|1",
    ratio="x plain|2", least_prompt="least|2", acceptance="acceptance|3", copied="copied|2",
    tokens_per_round="tok/round|2", bandwidth_share="of bandwidth|0%", ceiling_tokens_per_second="ceiling|0"
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """name: in reports. ignore_eos: decode all tokens that were asked for, whatever the model would say.

    families: of the prompts, where they have some.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    ignore_eos: bool
    families: tuple[str, ...] = ()

    def by_family(self) -> dict[str, list[int]]:
        """family -> numbers of its prompts; empty where there are not several."""
        found: dict[str, list[int]] = {}
        for number, family in enumerate(self.families):
            found.setdefault(family, []).append(number)
        return found if len(found) > 1 else {}

    @property
    def mean_length(self) -> float:
        return sum(map(len, self.prompts)) / len(self.prompts)


@dataclass(frozen=True)
class Answers:
    """What to measure with every engine: every combination.

    schedules: by the name that the report gives them.
    oracle: acceptances to simulate, None for the exit head's own drafts. sampling: all but max_tokens and ignore_eos.
    """

    workloads: Sequence[Workload]
    max_tokens: Sequence[int]
    schedules: Mapping[str, Schedule | Auto]
    oracle: Sequence[float | None] = (None,)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    repeats: int = 5


@dataclass
class Setting:
    """truth: the plain answer to every prompt, once it is known."""

    engine: Engine
    workload: Workload
    params: SamplingParams
    truth: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def agrees(self, prompt: int, ids: tuple[int, ...]) -> bool:
        return self.truth.setdefault(prompt, ids) == ids


@dataclass
class Case:
    """One line of the report. answers: what was measured, prompt after prompt, repeat after repeat.

    differing: how many of them were not plain decoding's.
    """

    setting: Setting
    name: str
    schedule: Schedule | Auto
    oracle: float | None
    answers: list[Statistics] = field(default_factory=list)
    differing: int = 0

    def measure(self, prompt: int) -> None:
        self.answers.append(self.run(prompt))

    def run(self, prompt: int) -> Statistics:
        setting, engine = self.setting, self.setting.engine
        ids = setting.workload.prompts[prompt]
        _forget(engine, ids)
        completion = engine.generate(ids, setting.params, self.schedule, self.options(prompt)).run()
        self.differing += not setting.agrees(prompt, completion.ids)
        return completion.statistics

    def options(self, prompt: int) -> RunOptions:
        if self.oracle is None:
            return RunOptions()
        text = (*self.setting.workload.prompts[prompt], *self.setting.truth[prompt])
        return RunOptions(oracle=Oracle(text, self.oracle, seed=len(self.answers) * 2**32))  # other draws every time

    @property
    def samples(self) -> list[Statistics]:
        """Of each whole repeat, its prompts added up."""
        return self.samples_of(range(len(self.setting.workload.prompts)))

    def samples_of(self, numbers: Sequence[int]) -> list[Statistics]:
        """The same of some of the prompts."""
        prompts = len(self.setting.workload.prompts)
        begins = range(0, len(self.answers) - prompts + 1, prompts)
        return [total([self.answers[begin + number] for number in numbers]) for begin in begins]

    def of_prompt(self, prompt: int) -> Spread | None:
        """Its decoding speed in every repeat; None for an answer of one token."""
        answers = self.answers[prompt :: len(self.setting.workload.prompts)]
        speeds = tuple(speed for answer in answers if (speed := answer.decode_tokens_per_second) is not None)
        return Spread(speeds) if speeds else None


def measure_generation(
    engines: Sequence[Engine],
    answers: Answers,
    facts: dict[str, Any],
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Report, bool]:
    """The report, and whether it is whole (Ctrl-C ends the run, not the report).

    engines: one for each format and thread count. Plain decoding is always measured. Everything runs once to warm up,
    short, but plain decoding whole: it is what the other answers are compared with, and what an oracle knows.
    """
    groups: list[list[Case]] = []  # the cases of a setting
    for engine in engines:
        for workload in answers.workloads:
            for max_tokens in answers.max_tokens:
                _check_length(engine, workload, max_tokens)
                params = replace(answers.sampling, max_tokens=max_tokens, ignore_eos=workload.ignore_eos)
                setting = Setting(engine, workload, params)
                others = {name: schedule for name, schedule in answers.schedules.items() if schedule != PLAIN}
                drafting = [Case(setting, *named, a) for named in others.items() for a in answers.oracle]
                groups.append([Case(setting, "plain", PLAIN, None), *drafting])
    cases = list(chain.from_iterable(groups))
    on_cpu = all(engine.backend.device == "cpu" for engine in engines)
    bandwidth = Bandwidth([engine.backend.threads for engine in engines]) if on_cpu else None
    whole = take_turns(cases, 1, _warm_up)
    if whole:
        actions: list[Callable[[], None]] = []
        if bandwidth is not None:
            actions += [partial(bandwidth.measure, threads) for threads in bandwidth.threads]
        for group in groups:
            prompts = range(len(group[0].setting.workload.prompts))
            actions += [partial(case.measure, prompt) for prompt in prompts for case in group]
        whole = take_turns(actions, answers.repeats, lambda action: action(), advance)
    return _report(cases, bandwidth, answers, facts, whole), whole


def _warm_up(case: Case) -> None:
    if case.schedule == PLAIN:
        for number in range(len(case.setting.workload.prompts)):
            case.run(number)
        return
    prompt, params = case.setting.workload.prompts[0], case.setting.params
    short = replace(params, max_tokens=min(8, params.max_tokens or 8))
    case.setting.engine.generate(prompt, short, case.schedule, case.options(0)).run()


def _check_length(engine: Engine, workload: Workload, max_tokens: int) -> None:
    longest, context = max(map(len, workload.prompts)), engine.config.max_position_embeddings
    if longest + max_tokens > context:
        raise UsageError(f"{longest} prompt tokens and {max_tokens} more do not fit the context of {context}")


def _forget(engine: Engine, prompt: Sequence[int]) -> None:
    """Make the KV cache hold a text that shares nothing with the prompt, and `recycle` know no answer."""
    engine.forget()
    engine.backend.logits([(prompt[0] + 1) % engine.config.vocab_size])


def total(parts: Sequence[Statistics]) -> Statistics:
    """All counts and times of several answers added up."""
    sums = Statistics()
    for name in (one.name for one in fields(Statistics) if one.type is not str and one.name != "threads"):
        for part in parts:
            setattr(sums, name, getattr(sums, name) + getattr(part, name))
    return sums


def _report(
    cases: Sequence[Case], bandwidth: Bandwidth | None, answers: Answers, facts: dict[str, Any], whole: bool
) -> Report:
    rows, families = [], []
    plain = cases[0]
    for case in cases:
        plain = case if case.schedule == PLAIN else plain  # every setting begins with plain decoding
        if not case.samples:
            continue
        everything = range(len(case.setting.workload.prompts))
        limits = _limits(case, bandwidth) if case is plain else {}
        rows.append({**_measured(case, plain, everything), "differing": case.differing, **limits})
        for family, numbers in case.setting.workload.by_family().items():
            named = {"workload": f"{family or 'no family'}: {len(numbers)}", "family": family}
            families.append({**_measured(case, plain, numbers), **named})
    summary = {
        "repeats": answers.repeats,
        "interrupted": not whole,
        "bandwidth": bandwidth.as_dict() if bandwidth else None,
        "results": [_short(row) for row in rows],
    }
    if families:
        summary["families"] = [_short(row) for row in families]
    several = len({row["kv_dtype"] for row in rows}) > 1  # else the table has no room for it
    columns = [column for column in COLUMNS if several or column.key != "kv_dtype"]
    title = "answers, every schedule against plain decoding in the same repeat"
    return Report(title, columns, [*rows, *families], facts, summary)


def _measured(case: Case, plain: Case, numbers: Sequence[int]) -> dict[str, Any]:
    """Of these prompts."""
    setting, backend, samples = case.setting, case.setting.engine.backend, case.samples_of(numbers)
    prompts = len(numbers)
    pairs = [(case.of_prompt(number), plain.of_prompt(number)) for number in numbers]
    by_prompt = [own.over(other).median for own, other in pairs if own and other]  # over the repeats
    by_prompt = by_prompt if len(setting.workload.prompts) > 1 else []
    decode, baseline = _decode_rate(samples, prompts), _decode_rate(plain.samples_of(numbers), prompts)
    whole = total(samples)
    return {
        "schedule": case.name,
        "oracle": case.oracle,
        "backend": backend.name,
        "device": backend.device,
        "dtype": backend.dtype,
        "kv_dtype": kv_dtype_of(backend),
        "threads": backend.threads,
        "workload": setting.workload.name,
        "prompts": prompts,
        "prompt_tokens": samples[0].prompt_tokens,
        "max_tokens": setting.params.max_tokens,
        "tokens": samples[0].tokens,
        "prompt_tokens_per_second": Spread(tuple(s.prompt_tokens / s.ttft_seconds for s in samples)),
        "decode_tokens_per_second": decode,
        "ratio": decode.over(baseline) if decode and baseline else None,
        "median_prompt": median(by_prompt) if by_prompt else None,
        "least_prompt": min(by_prompt, default=None),
        "by_prompt": by_prompt,
        "acceptance": whole.acceptance,
        "copied": whole.copied_accepted / whole.tokens or None,
        "tokens_per_round": (whole.tokens - prompts * len(samples)) / whole.rounds if whole.rounds else None,
    }


def _decode_rate(samples: Sequence[Statistics], prompts: int) -> Spread | None:
    """Tokens after the first one of each answer, by the time after the first one; None for answers of one token."""
    if samples[0].tokens <= prompts:
        return None
    return Spread(tuple((s.tokens - prompts) / s.decode_seconds for s in samples))


def _limits(case: Case, bandwidth: Bandwidth | None) -> dict[str, Any]:
    """What the memory bandwidth allows plain decoding, and how much of it was reached.

    A plain step reads all weights and the KV cache so far; the cache is counted at its mean length.
    """
    setting, backend, prompts = case.setting, case.setting.engine.backend, len(case.setting.workload.prompts)
    decode, answer = _decode_rate(case.samples, prompts), case.samples[0].tokens / prompts
    bytes = backend.bytes_per_token(round(setting.workload.mean_length + answer / 2))
    rate = bandwidth[backend.threads] if bandwidth else None
    ceiling = 1e9 * rate.median / bytes if rate else None
    return {
        "bytes_per_token": bytes,
        "bandwidth_share": decode.median / ceiling if decode and ceiling else None,
        "ceiling_tokens_per_second": ceiling,
    }


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the summary: medians, without what can be read off the others."""
    labels = ("schedule", "oracle", "dtype", "kv_dtype", "threads", "workload", "family", "max_tokens")
    speeds = ("prompt_tokens_per_second", "decode_tokens_per_second", "ratio", "median_prompt", "least_prompt")
    shares = ("bandwidth_share", "acceptance", "copied", "tokens_per_round", "differing")
    return medians(row, (*labels, *speeds, *shares))
