"""Second choices in a pipeline, for real: processes that sleep, with siblings and without, beside the simulator."""

from functools import partial

from .experiment import Claim, Experiment, Found, Parts, markdown
from .stages import middle, of, part, shown

ACCEPTANCE = 0.66
SECOND = 0.41  # as in branches.py
BESIDE = ":siblings=0.01"
SCHEDULES = ("ppsd", "elastic")


def parts(quick: bool) -> Parts:
    options = ["--acceptance", f"{ACCEPTANCE}", "--second", f"{SECOND}", "--token-ms", "80"]
    options += ["-n", "64", "-r", "1"] if quick else ["-n", "128", "-r", "3"]
    options += ["--schedules", ",".join([*SCHEDULES, *(name + BESIDE for name in SCHEDULES), "auto"])]
    return {f"{n} stages, {link} ms": partial(part, options, n, link) for link in (0, 5) for n in (2, 4, 8)}


def table(found: Found) -> str:
    rows = []
    for measured in found.values():
        auto = middle(of(measured, "auto", ACCEPTANCE), "speedup")
        for name in SCHEDULES:
            values = []
            for key in ("speedup", "simulated"):
                without, beside = (middle(of(measured, each, ACCEPTANCE), key) for each in (name, name + BESIDE))
                gain = beside / without if beside and without else None
                values += [without, beside, gain]
            rows.append((str(measured["stages"]), f"{measured['link_ms']:g}", name, *map(shown, values), shown(auto)))
    speeds = ("without", "with siblings", "gain", "simulated: without", "with", "gain", "`auto`")
    head = ("stages", "link, ms", "schedule", *speeds)
    return markdown(head, rows, left=3)


SIBLINGS = Experiment(
    "siblings",
    (Claim("SpecPipe", "abstract", "a tree of drafts fills a pipeline: 4.19x to 5.53x over plain pipelines"),),
    parts,
    table,
)
