"""Schedules on a real model's clock, by family of prompts; and other ways to draft without a second model."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.bench.cli.prompt_files import first_of_each_family, read_prompts
from ppsd_rt.bench.generate import Answers, Workload, measure_generation
from ppsd_rt.pipeline.schedule import parse_schedule

from .experiment import Experiment, Found, Parts, markdown

# With the exit head that ships.
WAYS = {
    **{f"{length} drafts": f"eesd:length={length},stop_rule=fixed" for length in (1, 2, 4, 6, 8)},
    "confidence .4": "eesd:stop_rule=confidence",
    "Beta-TS, reconstructed": "eesd:stop_rule=beta",
    "calibrated TS": "eesd:stop_rule=calibrated",
    "survival .3": "eesd:stop_rule=survival",
    "paying .2: `eesd`": "eesd",
    "in overlap: `ppsd`": "ppsd",
    "in overlap: `elastic`": "elastic",
    "copies: `lookup`": "lookup",
    "copies and successors: `recycle`": "recycle",
    "all of it: `auto`": "auto",
}
UNTRAINED = {"untrained exit after 3 layers, 2 drafts": "eesd:length=2,stop_rule=fixed"}
IN_FAMILIES = ("Beta-TS, reconstructed", "paying .2: `eesd`", "copies and successors: `recycle`", "all of it: `auto`")


def parts(quick: bool) -> Parts:
    return {
        f"{kind}T = {temperature:g}": partial(measured, head, ways, temperature, quick)
        for kind, head, ways in (("", "auto", WAYS), ("untrained, ", "norm:3", UNTRAINED))
        for temperature in (0.0, 0.8)
    }


def measured(head: str, ways: Mapping[str, str], temperature: float, quick: bool) -> dict[str, Any]:
    """By way: what `lab bench generate` finds, of all prompts and of each family. In turns, prompt by prompt."""
    engine = Engine.from_pretrained("smollm2-135m", backend="cpu", dtype="int8", exit_head=head)
    prompts = first_of_each_family(read_prompts(None), 2 if quick else None)
    asked = tuple(tuple(engine.encode([{"role": "user", "content": prompt.prompt}])) for prompt in prompts)
    workload = Workload("prompts", asked, False, tuple(prompt.family for prompt in prompts))
    schedules = {name: parse_schedule(text) for name, text in ways.items()}
    sampling = SamplingParams(temperature=temperature, seed=1)
    answers = Answers([workload], (96 if quick else 256,), schedules, sampling=sampling, repeats=1 if quick else 3)
    report, whole = measure_generation([engine], answers, {})
    if not whole:
        raise KeyboardInterrupt
    found: dict[str, Any] = {}
    for row in report.rows:
        way = found.setdefault(row["schedule"], {"families": {}})
        keys = ("median_prompt", "least_prompt", "acceptance", "tokens_per_round", "differing")
        facts = {"ratio": row["ratio"].as_dict()} | {key: row[key] for key in keys if key in row}
        if family := row.get("family"):
            way["families"][family] = facts
        else:
            way |= facts
    return found


def table(found: Found) -> str:
    kinds = {"": WAYS, "untrained, ": UNTRAINED}
    rows = [
        (name, *(word for t in ("0", "0.8") for word in _words(found[f"{kind}T = {t}"][name])))
        for kind, ways in kinds.items()
        for name in ways
    ]
    figures = ("x plain", "slowest prompt", "acceptance", "tokens a pass")
    every = markdown(("drafts", *(f"T = {t}: {figure}" for t in ("0", "0.8") for figure in figures)), rows)
    greedy = found["T = 0"]
    families = list(greedy["plain"]["families"])
    by_family = [
        (family, *(f"{greedy[name]['families'][family]['ratio']['median']:.2f}" for name in IN_FAMILIES))
        for family in families
    ]
    return (
        every
        + "\n\nBy family of prompts, greedy, times plain decoding:\n\n"
        + markdown(("family", *IN_FAMILIES), by_family)
    )


def _words(way: Mapping[str, Any]) -> tuple[str, str, str, str]:
    acceptance = way["acceptance"]
    return (
        f"{way['ratio']['median']:.2f}",
        f"{way['least_prompt']:.2f}",
        "-" if acceptance is None else f"{acceptance:.2f}",
        f"{way['tokens_per_round']:.2f}",
    )


CLOCK = Experiment("clock", parts, table)
