"""What a draft step costs, as a share of a plain step, by exit layer and draft vocabulary: where the cache ends.

    python benchmarks/draft_cost.py --layers 2,3,6 --vocabulary 4096,8192 -t 1,2

first: after a pass, which has displaced its weights from the cache; further: after another draft; of_four: the mean
of a round of four.
The heads are untrained (their weights cost what trained ones cost). The last line is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

from ppsd_rt import Engine
from ppsd_rt._native import Costs
from ppsd_rt.cli.info import machine
from ppsd_rt.cpu.backend import CpuBackend
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.exit_head import ExitHead
from ppsd_rt.models.head_file import HeadInfo
from ppsd_rt.models.llama import LlamaForCausalLM
from ppsd_rt.models.resolve import resolve_model


def numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--layers", type=numbers, default=[2, 3, 4, 6], help="exit layers [2,3,4,6]")
    parser.add_argument("--vocabulary", type=numbers, default=[4096, 8192], help="draft vocabularies [4096,8192]")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("-t", "--threads", type=numbers, default=[1, 2])
    parser.add_argument("-r", "--repeats", type=int, default=5)
    args = parser.parse_args()

    checkpoint = Checkpoint(resolve_model(args.model))
    model = LlamaForCausalLM.from_checkpoint(checkpoint, torch.bfloat16, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        cases = {}
        for layer in args.layers:
            for size in args.vocabulary:
                info = HeadInfo("layer", layer, args.model, checkpoint.hash)
                path = Path(folder) / f"{layer}-{size}.safetensors"
                ExitHead.from_model(model, info, list(range(size))).save(path)
                for threads in args.threads:
                    engine = Engine.from_pretrained(args.model, exit_head=path, dtype=args.dtype, threads=threads)
                    cases[layer, size, threads] = engine
        moments: dict[tuple[int, int, int], list[Costs]] = {case: [] for case in cases}
        for _ in range(args.repeats):  # in turns
            for case, engine in cases.items():
                assert isinstance(engine.backend, CpuBackend)
                moments[case].append(engine.backend.costs(again=True))
    rows = []
    print(f"{args.dtype}: exit layer, draft vocabulary, threads: a draft as a share of a plain step")
    for (layer, size, threads), values in moments.items():
        row: dict[str, float] = {"exit_layer": layer, "draft_vocabulary": size, "threads": threads}
        shown = ""
        for name, shares in (
            ("first", [costs.turns.first_draft for costs in values]),
            ("further", [costs.turns.draft_step for costs in values]),
            ("of_four", [costs.turns.draft_share(4) for costs in values]),
        ):
            if name != "of_four":
                shares = [s / c.plain_seconds for s, c in zip(shares, values, strict=True)]
            row |= {name: statistics.median(shares), f"{name}_low": min(shares), f"{name}_high": max(shares)}
            shown += f"  {name} {row[name]:.3f} ({min(shares):.3f} to {max(shares):.3f})"
        rows.append(row)
        print(f"{layer:3} {size:6} {threads:3}{shown}")
    print(json.dumps({"dtype": args.dtype, "repeats": args.repeats, "rows": rows, "machine": machine()}))


if __name__ == "__main__":
    main()
