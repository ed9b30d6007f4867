"""Answers every line of a file, side by side, and writes one JSON object for each as soon as it has ended.

python examples/batch.py prompts.txt answers.jsonl
"""

import argparse
import json
from pathlib import Path

from ppsd_rt import Committed, Engine, SamplingParams


def answer_all(engine: Engine, prompts: list[str], params: SamplingParams, out: Path) -> None:
    asked = [[{"role": "user", "content": prompt}] if engine.tokenizer.chat_template else prompt for prompt in prompts]
    left = dict(enumerate(prompts))
    with out.open("w", encoding="utf-8") as file, engine.generate_many(asked, params) as generations:
        for number, event in generations.events():
            if number in left and isinstance(event, Committed):
                completion = generations.completion(number)
                if completion.finish_reason != "cancelled":  # as it is called until it has ended
                    found = {"prompt": left.pop(number), "text": completion.text, "ended": completion.finish_reason}
                    print(json.dumps(found, ensure_ascii=False), file=file, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("-n", "--max-tokens", type=int, default=256)
    args = parser.parse_args()
    prompts = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    with Engine.from_pretrained(args.model) as engine:
        answer_all(engine, prompts, SamplingParams(max_tokens=args.max_tokens), args.out)


if __name__ == "__main__":
    main()
