"""The development prompts, answered by `auto`, by plain decoding and by llama.cpp, in turns, prompt by prompt.

    python benchmarks/peers_prompts.py                                     # all 34: some minutes
    python benchmarks/peers_prompts.py --limit 1 -n 64 -r 1 --engines ppsd-rt:int8+auto,llama.cpp:Q8_0
    python benchmarks/peers_prompts.py -r 1 --engines ppsd-rt:int8+auto,llama-server:Q8_0,llama-server:Q8_0+ngram-simple

Every engine decodes as many tokens for a prompt as our plain answer has (-n at most), greedily and past any end, so
all do the same work; what they write differs, as their arithmetic does. The prompt's own time does not count. `x`: the
speed of the first engine over this one's, over all prompts, by repeat; `median` and `least`: of the prompts. Needs what
peers.py needs. The last line of the output is one JSON object.
"""

import argparse
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import median
from typing import Any

from peers import Worker, at_hand, common_arguments, engine_and_format, model_for, parse, print_with_summary

from ppsd_rt import Engine, SamplingParams, _native
from ppsd_rt.bench.cli.bench import run_facts
from ppsd_rt.bench.cli.options import positive
from ppsd_rt.bench.cli.prompt_files import first_of_each_family, read_prompts
from ppsd_rt.bench.report import Report, columns, medians
from ppsd_rt.bench.spread import Spread, take_turns
from ppsd_rt.cli.progress import progress_bar
from ppsd_rt.cli.values import several

ENGINES = "ppsd-rt:int8+auto,ppsd-rt:int8,llama.cpp:Q8_0,llama.cpp:IQ4_NL"

COLUMNS = columns(
    engine="engine", threads="threads", decode_tokens_per_second="decode tok/s|1", times="x|2",
    median_prompt="median|2", least_prompt="least|2"
)  # fmt: skip


@dataclass
class Case:
    """seconds[prompt]: of all tokens but the first, in every repeat."""

    name: str
    worker: Worker
    prompts: list[tuple[list[int], int]]
    seconds: list[list[float]] = field(default_factory=list)

    def measure(self, number: int) -> None:
        prompt, tokens = self.prompts[number]
        self.seconds[number].append(self.worker.ask(prompt=prompt, tokens=tokens)["rest"])

    @property
    def total(self) -> Spread:
        return Spread(tuple(map(sum, zip(*self.seconds, strict=False))))


def main() -> int:
    args = _arguments()
    names, absent = at_hand(args.engines or several(engine_and_format)(ENGINES))
    prompts = _prompts(args)
    context = max(len(prompt) + tokens for prompt, tokens in prompts)
    facts = run_facts("peers-prompts", args.model)
    facts |= {"command": " ".join(["python", *sys.argv]), "absent": absent, "prompts": len(prompts)}
    cases: list[Case] = []
    try:
        for (engine, format), threads in product(names, args.threads):
            worker = Worker(engine, format, str(model_for(args.model, engine, format)), threads, context)
            cases.append(Case(f"{engine}:{format}", worker, prompts, [[] for _ in prompts]))
        facts["engines"] = {case.name: case.worker.about for case in cases}
        take_turns(cases, 1, lambda case: case.worker.ask(prompt=prompts[0][0], tokens=4))
        actions = [partial(case.measure, number) for number in range(len(prompts)) for case in cases]
        with progress_bar("measuring") as advance:
            whole = take_turns(actions, args.repeats, lambda action: action(), advance)
    finally:
        for case in cases:
            case.worker.close()
    rows = [_row(case, cases[0]) for case in cases if case.total.samples]
    results = [medians(row, [column.key for column in COLUMNS]) | {"by_prompt": row["by_prompt"]} for row in rows]
    summary = {"repeats": args.repeats, "interrupted": not whole, "results": results}
    print_with_summary(
        Report("the first engine over each, the same prompts in turns", COLUMNS, rows, facts, summary), args.output
    )
    return 0 if whole else 130


def _prompts(args: argparse.Namespace) -> list[tuple[list[int], int]]:
    """(ids, tokens of the plain answer) of every prompt that is answered with more than one token."""
    engine = Engine.from_pretrained(args.model, backend="cpu", dtype="int8", exit_head="none")
    found = []
    for prompt in first_of_each_family(read_prompts(args.prompts), args.limit):
        ids = engine.encode([{"role": "user", "content": prompt.prompt}])
        answer = engine.generate(ids, SamplingParams(max_tokens=args.max_tokens), "plain").run()
        if len(answer.ids) > 1:
            found.append((ids, len(answer.ids)))
    return found


def _row(case: Case, first: Case) -> dict[str, Any]:
    tokens = sum(tokens - 1 for _, tokens in case.prompts)
    pairs = zip(case.seconds, first.seconds, strict=True)
    by_prompt = [Spread(tuple(theirs)).over(Spread(tuple(ours))).median for theirs, ours in pairs if theirs and ours]
    return {
        "engine": case.name,
        "threads": case.worker.threads,
        "decode_tokens_per_second": case.total.map(lambda seconds: tokens / seconds),
        "times": case.total.over(first.total),
        "median_prompt": median(by_prompt),
        "least_prompt": min(by_prompt),
        "by_prompt": by_prompt,
    }


def _arguments() -> argparse.Namespace:
    parser = common_arguments(__doc__, ENGINES, [min(2, len(_native.usable_cores()))], repeats=3)
    parser.add_argument("-n", "--max-tokens", type=positive, default=256, help="[256]")
    parser.add_argument("--prompts", help="a file, such as Spec-Bench's [the development prompts]")
    parser.add_argument("--limit", type=positive, help="only the first of each family [all]")
    return parse(parser)


if __name__ == "__main__":
    sys.exit(main())
