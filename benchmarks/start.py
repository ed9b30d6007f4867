"""What a new user waits for: the first token of the command, a second question about a document, the first answer.

    python benchmarks/start.py                                    # some minutes
    python benchmarks/start.py -m qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --document long.txt -r 5 --fresh 20

`start`: the whole process of `ppsd-run -n 1`, in turns with llama.cpp's `llama-completion` on the same file, after two
processes of each that are not counted. `question`: seconds to the first token of `ppsd-run --prompt-cache`, of the
first question about the document and of the second, each time with a new file. `first answer`: speed of `auto` over
plain decoding in a new process whose cache folder is empty but for the model; plain is the better of two answers after
it, the same prompt. Nothing is copied from earlier answers (`recycle=off`). The last line is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from llama_library import BUILT
from peers import model_for

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.bench.cli.bench import run_facts
from ppsd_rt.bench.cli.prompt_files import read_prompts
from ppsd_rt.bench.spread import take_turns
from ppsd_rt.models.cache import cache_dir

RUN = [sys.executable, "-m", "ppsd_rt"]
PEER = BUILT.with_name("llama-completion")
DOCUMENT = Path(__file__).parent.parent / "docs/design/exactness.md"
QUESTIONS = ("What is this text about?", "Which names does this text have?")


def main() -> None:
    args = _arguments()
    if args.answer is not None:
        print(json.dumps(first_answer(args.model, args.dtype, args.answer)))
        return
    facts = run_facts("start", args.model) | {"command": " ".join(["python", *sys.argv]), "dtype": args.dtype}
    rows = {"start": starts(args), "question": questions(args), "first answer": first_answers(args)}
    for name, row in rows.items():
        print(name, json.dumps(row))
    print(json.dumps(facts | {"results": rows}))


def starts(args: argparse.Namespace) -> dict[str, object]:
    """Seconds of whole processes with one token, in turns."""
    commands = {"ppsd-run": [*RUN, "-m", args.model, "--dtype", args.dtype, "-n", "1", "-q", "Hi"]}
    if PEER.exists():
        file = str(model_for(args.model, "llama.cpp", "file"))
        commands["llama.cpp"] = [str(PEER), "-m", file, "-n", "1", "-p", "Hi", "-no-cnv", "-t", str(os.cpu_count())]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    take_turns(list(commands), args.repeats + 2, lambda name: seconds[name].append(seconds_of(commands[name])))
    return {name: {"median": median(each[2:]), "seconds": each[2:]} for name, each in seconds.items()}


def questions(args: argparse.Namespace) -> dict[str, object]:
    """(first, second) seconds to the first token about one document, and the median of their ratios."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.repeats):
            kept = ["--prompt-cache", f"{folder}/{turn}", "--json", "-n", "1", "-f", args.document]
            first, second = (
                json.loads(output_of([*RUN, "-m", args.model, "--dtype", args.dtype, *kept, question]))["stats"]
                for question in QUESTIONS
            )
            pairs.append((first["ttft_seconds"], second["ttft_seconds"], first["prompt_tokens"]))
    return {"ratio": median(second / first for first, second, _ in pairs), "first, second, prompt's tokens": pairs}


def first_answers(args: argparse.Namespace) -> dict[str, object]:
    """Speed of `auto` over plain decoding of each prompt's first answer, each with a cache folder of its own."""
    ratios = []
    for prompt in range(args.fresh):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "models").symlink_to(cache_dir() / "models")
            command = [sys.executable, __file__, "-m", args.model, "--dtype", args.dtype, "--answer", str(prompt)]
            ratios.append(json.loads(output_of(command, PPSD_CACHE=folder)))
    return {"median": median(ratios), "least": min(ratios), "ratios": ratios}


def first_answer(model: str, dtype: str, number: int) -> float:
    engine = Engine.from_pretrained(model, backend="cpu", dtype=dtype)
    prompts = read_prompts(None)
    ids = engine.encode([{"role": "user", "content": prompts[number % len(prompts)].prompt}])

    def seconds(schedule: str) -> float:
        return engine.generate(ids, SamplingParams(max_tokens=128), schedule).run().statistics.decode_seconds

    auto = seconds("auto:recycle=off")
    return min(seconds("plain"), seconds("plain")) / auto


def seconds_of(command: Sequence[str]) -> float:
    began = time.perf_counter()
    output_of(command)
    return time.perf_counter() - began


def output_of(command: Sequence[str], **environment: str) -> str:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, env=os.environ | environment
    ).stdout


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int4", help="[int4]")
    parser.add_argument("--document", default=str(DOCUMENT), help="a text file")
    parser.add_argument("-r", "--repeats", type=int, default=5, help="[5]")
    parser.add_argument("--fresh", type=int, default=20, help="first answers [20]")
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
