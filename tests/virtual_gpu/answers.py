"""Answers on a virtual GPU, in a process of their own: reads jobs as JSON from stdin, prints results as JSON.

A job: the capability, the format, schedules, seeds, and perhaps a mutation (mutations.py). Its result: the tokens of
each answer, and what was wrong. The program ends with the first fault, for a GPU that has failed stays failed; and with
the first answer that is not the job's `truth`, where it has one. With `company` three answers are decoded alone, then
side by side.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from ppsd_rt import PpsdError, _native
from ppsd_rt.backend import Oracle, RunOptions
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.pipeline.rounds import Limits, Round
from ppsd_rt.pipeline.schedule import parse_schedule
from ppsd_rt.sampling.params import SamplingParams

sys.path.append(str(Path(__file__).parents[1]))
from support import loud_head, write_model
from virtual_gpu.device import install
from virtual_gpu.mutations import MUTATIONS

# Heads and channels that are no multiples of each other; three layers: one drafts.
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
PROMPT = [72, 101, 108, 17, 17, 101, 108]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=3)
FILTERED = replace(SAMPLED, top_k=20, top_p=0.9, repetition_penalty=1.3)
REQUESTS = {"greedy": GREEDY, "sampled": SAMPLED, "filtered": FILTERED}
SCHEDULES = {
    "plain": "plain",
    "fixed": "eesd:length=2,stop_rule=fixed",
    "turns": "eesd:length=3,stop_rule=survival=0.001",
    "long": "eesd:length=5,stop_rule=fixed",
    "copies": "recycle:lookup=1",
    "overlap": "elastic:first_chunk=1,lookup=1",
    "ppsd": "ppsd",
}


def toy_model(folder: Path) -> Path:
    """With an exit head of each kind: of norms alone, and one that receives."""
    write_model(folder, num_key_value_heads=2, **SHAPE)
    head = loud_head(Checkpoint(folder).hash, exit_layer=1, sizes=(64, 64), num_key_value_heads=2, **SHAPE)
    head.save(folder / "feedback.safetensors")
    return folder


def side_by_side(engine, gpu, schedule):
    """-> the three answers alone by the stages of one, and side by side by the loop."""
    from ppsd_rt.cuda.graphs import Graphs
    from ppsd_rt.cuda.passes import CudaPasses

    asked = [(PROMPT, GREEDY), (PROMPT[:3], SAMPLED), (PROMPT[2:], replace(SAMPLED, temperature=1.3, seed=2**40))]
    asked = [(prompt, replace(params, max_tokens=5)) for prompt, params in asked]
    alone = [engine.generate(*each, "plain").run().ids for each in asked]
    device = torch.device("cpu")
    graphs = None if engine.backend.facts()["launches"] == "one by one" else Graphs(device)
    passes = CudaPasses(engine.backend.weights, 4, pdl=gpu.sm >= 90, graphs=graphs)
    loop = _native.Loop.of_passes(passes, 4, 8, 16)
    streams = []
    for place, (prompt, params) in enumerate(asked):
        drafts, limits = parse_schedule(schedule if place else "plain"), Limits(len(prompt) + params.max_tokens)
        streams.append(loop.add(prompt, params.for_backend(prompt), drafts, limits))
    told = [[event for event in stream if isinstance(event, Round)] for stream in streams]
    together = [tuple(token for round in rounds for token in round.committed) for rounds in told]
    return alone, together


def main() -> None:
    torch.set_num_threads(1)
    job = json.load(sys.stdin)
    mutation = MUTATIONS[job["mutation"]] if "mutation" in job else None
    gpu = install(Path(job["library"]), job["sm"], mutation.change if mutation else str)
    from ppsd_rt.engine import Engine  # after the GPU: it imports the kernels

    folder, prompt = Path(job["folder"]), (PROMPT * 99)[: job.get("prompt", len(PROMPT))]
    head = str(folder / "feedback.safetensors") if job.get("feedback") else "norm:1"
    engine = Engine.from_pretrained(folder, backend="cuda", device="cpu", dtype=job["format"], exit_head=head)
    params = REQUESTS[job.get("request", "greedy")]
    params = replace(params, max_tokens=job.get("tokens", params.max_tokens))
    result = {"answers": [], "differences": 0, "fault": "", "changed": 0}
    truth: tuple[int, ...] = ()
    first, last = job.get("seeds", (0, 1))
    if "company" in job:
        alone, together = side_by_side(engine, gpu, SCHEDULES[job["company"]])
        result["answers"] = [{"ids": ids} for ids in together]
        result["differences"] = sum(one != other for one, other in zip(alone, together, strict=True))
        result["fault"], last = gpu.fault or gpu.first_race, first
    for seed, name in [(seed, name) for seed in range(first, last) for name in ["plain", *job["schedules"]]]:
        if name == "plain" and truth:
            continue
        gpu.set(seed)
        # Else hardly a draft of a random model would be right.
        oracle = Oracle((*prompt, *truth), 0.7, seed) if name not in ("plain", "copies") else None
        try:
            done = engine.generate(prompt, params, SCHEDULES[name], RunOptions(oracle=oracle)).run()
        except PpsdError as error:
            result["fault"] = gpu.fault or str(error)
            break
        truth = truth or done.ids
        counts = done.statistics
        answer = {"schedule": name, "seed": seed, "ids": done.ids, "judged": counts.judged}
        result["answers"].append({**answer, "accepted": counts.accepted})
        result["differences"] += done.ids != truth
        result["fault"] = gpu.fault or gpu.first_race
        if result["fault"] or list(done.ids) != job.get("truth", list(done.ids)):
            break
    result["changed"] = mutation.changed if mutation else 0
    result["instructions"] = gpu.instructions
    result["launches"] = engine.backend.facts()["launches"]
    print(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # streams of a GPU that has failed need not be taken down


if __name__ == "__main__":
    main()
