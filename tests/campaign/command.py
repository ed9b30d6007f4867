"""A campaign: random engines, texts, sampling and schedules against plain decoding, resumable after every case.

    PYTHONPATH=tests python -m campaign --tokens 100000 --seed 1

`--seed S --case K` plays one case again. It runs over ranks too: `torchrun --nproc-per-node 2 -m campaign ...`.
"""

import argparse
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ppsd_rt import _native
from ppsd_rt.bench.cli.bench import evaluation_text, interrupted, run_facts
from ppsd_rt.bench.cli.prompt_files import read_prompts
from ppsd_rt.cli.commands import Command
from ppsd_rt.cli.common import as_chat, load_engine, load_one_process, print_json, table
from ppsd_rt.cli.notes import complain, note
from ppsd_rt.cli.options import model_options
from ppsd_rt.cli.progress import progress_bar
from ppsd_rt.cli.values import group, named, positive, whole
from ppsd_rt.cpu.answers import MOST_ANSWERS
from ppsd_rt.cpu.backend import CpuBackend
from ppsd_rt.cpu.formats import KV_FORMATS, kv_format
from ppsd_rt.cpu.machine import cpu_name
from ppsd_rt.engine import Engine
from ppsd_rt.errors import UsageError
from ppsd_rt.extras import is_there
from ppsd_rt.models.head_file import EAGLE3

from . import draw
from .draw import Case, Material, draw_case
from .run import Outcome, Pair, load_pair, run_case

_FORMATS = {"int8": 10.0, "int4": 10.0, "bfloat16": 2.0, "float32": 1.5}
_THREADS = {1: 2.0, 2: 7.0, 3: 1.0}
_STAGES = {1: 2.0, 2: 1.0, 3: 1.0}


def build_id() -> str:
    """Of the C++ extension and of what draws the cases: with others, a case is another one."""
    digest = hashlib.sha256(Path(_native.__file__).read_bytes())
    digest.update(Path(draw.__file__).read_bytes())
    return digest.hexdigest()[:12]


class State:
    """The outcomes in a file, a line each. What a killed process has left half written is dropped."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        path.write_text("".join(whole), encoding="utf-8")
        self._path = path
        self.outcomes = {found["case"]: Outcome(**found) for found in map(json.loads, whole)}

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.case] = outcome
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")

    @property
    def tokens(self) -> int:
        return sum(outcome.tokens for outcome in self.outcomes.values())

    @property
    def next(self) -> int:
        return max(self.outcomes, default=-1) + 1

    def total(self) -> dict[str, Any]:
        """All cases together, as plain values."""
        outcomes = self.outcomes.values()
        by: dict[str, dict[str, list[int]]] = {}
        passes: Counter[str] = Counter()
        for outcome in outcomes:
            passes.update(outcome.passes)
            for dimension, values in outcome.tally.items():
                for value, counts in values.items():
                    sums = by.setdefault(dimension, {}).setdefault(value, [0, 0, 0])
                    sums[:] = map(sum, zip(sums, counts, strict=True))
        names = "answers", "tokens", "differences"
        return {
            "cases": len(self.outcomes),
            "answers": sum(outcome.answers for outcome in outcomes),
            "tokens": self.tokens,
            "plain_tokens": sum(outcome.plain_tokens for outcome in outcomes),
            "seconds": sum(outcome.seconds for outcome in outcomes),
            "by": {
                dimension: {value: dict(zip(names, sums, strict=True)) for value, sums in sorted(values.items())}
                for dimension, values in by.items()
            },
            "passes": dict(sorted(passes.items(), key=lambda item: tuple(map(int, item[0].split("/"))))),
            "differences": [difference for outcome in outcomes for difference in outcome.differences],
        }


def run_campaign(args: argparse.Namespace) -> int:
    if args.tokens is None and args.case is None:
        raise UsageError("give --tokens N, or --case K to see one again")
    engine = load_engine(args)
    own = args.engine is None and isinstance(engine.backend, CpuBackend)  # every case has its own engines
    material = _material(args, engine, own)
    given = None if own else Pair(engine, load_one_process(args))
    if args.case is not None:
        return _one_case(args, material, given)
    campaign = {
        "campaign": 1,
        "seed": args.seed,
        "model": engine.checkpoint.hash,
        "build": build_id(),
        "cpu": cpu_name(),
        "options": {name: getattr(args, name) for name in ("exit_head", "dtype", "kv_dtype", "threads", "raw")},
        "isas": list(material.isas),
        "grammars": material.grammars,
        "engine": "drawn" if own else {"backend": engine.backend.name, **_layers(engine)},
        "prompts": args.prompts or "",
        "stages": args.stages,
    }
    del engine  # its memory is for those of the cases
    # The name has all that the campaign is, so that another build begins its own.
    digest = hashlib.sha256(json.dumps(campaign).encode()).hexdigest()[:8]
    state = State(Path(f"build/campaign/seed-{args.seed}-{digest}.jsonl"))
    whole = True
    with progress_bar("checking") as advance:
        try:
            _go_on(args, material, given, state, advance)
        except KeyboardInterrupt:
            if not state.outcomes:
                raise
            whole = False
    status = _report(args, campaign, state, whole)
    return status if whole else interrupted()


def _layers(engine: Engine) -> dict[str, Any]:
    return {name: value for name, value in engine.backend.facts().items() if name in ("ranks", "layers")}


def _material(args: argparse.Namespace, engine: Engine, own: bool) -> Material:
    config, backend = engine.config, engine.backend
    isas = [os.environ["PPSD_ISA"]] if os.environ.get("PPSD_ISA") else _native.usable_isas()
    kv_formats = [name for name in KV_FORMATS if name != "int8" or kv_format("int8", config.head_dim) == "int8"]
    texts = [prompt.prompt for prompt in read_prompts(args.prompts)]
    forms = [engine.encode(text) for text in texts]
    if not args.raw:
        forms += [engine.encode(as_chat(engine, text, raw=False)) for text in texts]
    return Material(
        questions=tuple(map(tuple, forms)),
        text=tuple(engine.tokenizer.encode(evaluation_text())),
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        layers=config.num_hidden_layers,
        isas={isa: 1.0 if place else 12.0 for place, isa in enumerate(isas)},
        dtypes=_FORMATS if args.dtype == "auto" else {args.dtype: 1.0},
        kv_dtypes=dict.fromkeys(["auto", *kv_formats] if args.kv_dtype == "auto" else [args.kv_dtype], 1.0),
        threads={args.threads: 1.0} if args.threads else _THREADS,
        stages=_STAGES if args.stages == 1 else {args.stages: 1.0},
        head=args.exit_head,
        exit_layer=engine.head.exit_layer if engine.head else None,
        engine=own,
        most_at_once=min(MOST_ANSWERS, backend.concurrency),
        row_bytes=4 * (config.kv_values + config.hidden_size + 2 * config.head_dim),
        copies=backend.copies,
        overlaps=engine.head is None or engine.head.kind != EAGLE3,
        extras=bool(backend.extras),
        grammars="grammar" in backend.extras and is_there("llguidance"),
    )


def _go_on(
    args: argparse.Namespace, material: Material, given: Pair | None, state: State, advance: Callable[[int, int], None]
) -> None:
    if state.outcomes:
        note(f"going on after case {state.next - 1}: {state.tokens:,} of {args.tokens:,} tokens")
    advance(state.tokens, args.tokens)
    while state.tokens < args.tokens:
        state.add(_run(args, draw_case(material, args.seed, state.next), given))
        advance(state.tokens, args.tokens)


def _run(args: argparse.Namespace, case: Case, given: Pair | None) -> Outcome:
    if given is None:
        assert case.setup is not None
        given = load_pair(args.model, case.setup)
    return run_case(case, given, lambda text: complain(f"DIFFERENT {text}"))


def _one_case(args: argparse.Namespace, material: Material, given: Pair | None) -> int:
    case = draw_case(material, args.seed, args.case)
    outcome = _run(args, case, given)
    if args.json:
        print_json({**asdict(outcome), "setup": asdict(case.setup) if case.setup else None})
    else:
        setup = ", ".join(f"{key} {value}" for key, value in asdict(case.setup).items()) if case.setup else "as given"
        print(f"case {case.number} of seed {args.seed}: {len(case.texts)} texts; {setup}")
        print(_verdict(outcome.answers, outcome.tokens, len(outcome.differences)))
    return 1 if outcome.differences else 0


def _report(args: argparse.Namespace, campaign: dict[str, Any], state: State, whole: bool) -> int:
    total = state.total()
    if args.json:
        print_json({**run_facts("check", args.model), **campaign, "interrupted": not whole, **total})
    else:
        rows = [
            [dimension if place == 0 else "", value, *(f"{count:,}" for count in counts.values())]
            for dimension, values in total["by"].items()
            for place, (value, counts) in enumerate(values.items())
        ]
        table("", ["", "", "answers", "tokens", "differences"], rows)
        print(_verdict(total["answers"], total["tokens"], len(total["differences"])))
    return 1 if total["differences"] else 0


def _verdict(answers: int, tokens: int, differences: int) -> str:
    return f"{differences} differences from plain decoding in {answers:,} answers, {tokens:,} tokens"


def campaign_options(parser: argparse.ArgumentParser) -> None:
    add = group(parser, "what to check; given options of the machine stay as given")
    add("--tokens N", "until N tokens have been compared", positive)
    add("--seed S", "same seed, same cases [0]", whole, default=0)
    add("--case K", "only case K, to see again what differed in it", whole)
    add("--prompts FILE", "as for generating [the 34 development prompts]", named)
    add("--raw", "do not apply the chat template")
    add("--json", "print the result as one JSON object")
    model_options(parser)


class _Campaign(Command):
    def load(self) -> Callable[[argparse.Namespace], int]:
        return run_campaign


CAMPAIGN = _Campaign(
    "random cases against plain decoding", ("campaign --tokens 100000",) * 2, options=campaign_options, place=""
)
