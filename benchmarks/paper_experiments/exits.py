"""Exit layer against draft length, with exits of equal training: a model that was trained to exit after each layer."""

from functools import cache
from pathlib import Path
from typing import Any

from early_exit_model import HELD_OUT, LAYERS, sources, train, write
from made_up_costs import one_machine

from ppsd_rt import Engine
from ppsd_rt.lab.bench.plot import Chart, Line, Panel
from ppsd_rt.models.cache import cache_dir
from ppsd_rt.pipeline.schedule import MAX_CHUNK

from .experiment import Claim, Experiment, Found, Parts, markdown
from .lengths_replay import Rule, paying, replay
from .recorded import texts_of

EXITS = (1, 2, 3, 4, 6)
SHOWN = (1, 2, 4, 6, 8, 15)  # draft lengths in the table
ROW = 0.035  # what a row adds to a pass, in plain tokens: of the default model
PROMPT, TOKENS = 96, 128  # bytes
WARM = 0.8  # temperature: greedy answers of so small a model repeat themselves


def parts(quick: bool) -> Parts:
    steps, prompts = (600, 8) if quick else (4000, 48)
    return {f"exit {layer}": lambda layer=layer: measured(layer, steps, prompts) for layer in EXITS}


@cache
def model(steps: int) -> Path:
    """Trained once and kept, as other things that take minutes."""
    folder = cache_dir() / "benchmarks" / f"early-exit-{steps}"
    if not (folder / "tokenizer.json").exists():  # what is written last
        write(folder, train(steps)[0])
    return folder


def measured(layer: int, steps: int, prompts: int) -> dict[str, Any]:
    """Speeds of every draft length, times plain decoding. A draft costs its share of the layers, and its row."""
    engine = Engine.from_pretrained(model(steps), exit_head=f"norm:{layer}", backend="cpu", dtype="bfloat16", threads=1)
    files = [sources()[-1 - number % HELD_OUT] for number in range(prompts)]
    begins = [len(file) // (2 + number // HELD_OUT) for number, file in enumerate(files)]
    asked = [list(file[at : at + PROMPT]) for file, at in zip(files, begins, strict=True)]
    text = texts_of(engine, asked, TOKENS, WARM)
    costs = one_machine(layer / LAYERS, ROW)
    fixed = [replay(text, costs, Rule("fixed", 0, most)).speed for most in range(1, MAX_CHUNK + 1)]
    rules = {"Beta-TS": replay(text, costs, Rule("beta", 0, 6)), "paying": replay(text, costs, Rule(paying(costs), 0))}
    return {
        "acceptance": text.acceptance,
        "tokens": len(text.right),
        "cost": layer / LAYERS,
        "fixed": [speed * costs.plain_step for speed in fixed],
        "rules": {name: run.speed * costs.plain_step for name, run in rules.items()},
    }


def table(found: Found) -> str:
    """Times plain decoding."""
    rows = [
        (
            name.removeprefix("exit ") + f" of {LAYERS}",
            f"{case['cost']:.3f}",
            f"{case['acceptance']:.2f}",
            *(f"{case['fixed'][length - 1]:.2f}" for length in SHOWN),
            *(f"{speed:.2f}" for speed in case["rules"].values()),
        )
        for name, case in found.items()
    ]
    head = (
        "exit layer",
        "cost of a draft",
        "acceptance",
        *(f"{length} drafts" for length in SHOWN),
        "Beta-TS",
        "paying",
    )
    return markdown(head, rows)


def charts(found: Found) -> dict[str, Chart]:
    lines = [Line(name, [(k + 1, speed) for k, speed in enumerate(case["fixed"])]) for name, case in found.items()]
    return {"exits": Chart("Exit layer and draft length", "draft length", "speed (times plain)", [Panel("", lines)], 1)}


EXITS_AND_LENGTHS = Experiment(
    "exits",
    (Claim("EESD", "Figure 1 (b)", "speed depends on the exit layer and on the draft length, and has one best place"),),
    parts,
    table,
    charts,
)
