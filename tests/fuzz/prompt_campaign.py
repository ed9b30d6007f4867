"""Answers whose prompts came from a file, against engines that read them.

    PYTHONPATH=tests python -m fuzz.prompt_campaign [ANSWERS [SEED]]

Random models, formats of weights and of the KV cache, exit heads, schedules, sampling, and documents of random lengths
of which the question keeps a part. Prints one line; exit status 1 where an answer differs.
"""

import random
import sys
import tempfile
from pathlib import Path

from support import tiny_model, write_model

from ppsd_rt import Engine, SamplingParams

_EACH = 20  # answers with one file
_SCHEDULES = ("auto", "plain", "eesd", "ppsd", "lookup", "eesd:length=4")


def main(answers: int, seed: int) -> int:
    draw, done, differ, shared = random.Random(seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(number) for number in range(3)]
        for number, place in enumerate(places):
            shape = {"head_dim": 32, "max_position_embeddings": 1024}
            write_model(place, tiny_model(seed=number, **shape), **shape)
        while done < answers:
            options = {
                "exit_head": draw.choice(("none", "norm:1", "norm:2")),
                "dtype": draw.choice(("float32", "bfloat16", "int8", "int4")),
                "kv_dtype": draw.choice(("float32", "bfloat16", "int8")),
                "threads": draw.choice((1, 2)),
                "kv_memory": 1 << 26,
            }
            place, file = draw.choice(places), Path(folder) / f"prompts-{done}"
            first, second, fresh = (Engine.from_pretrained(place, backend="cpu", **options) for _ in range(3))
            documents = [[draw.randrange(250) for _ in range(draw.randrange(10, 500))] for _ in range(_EACH)]
            for document in documents:
                first.generate([*document, 1], SamplingParams(max_tokens=8)).run()
            first.save_prompts(file)
            second.load_prompts(file)
            for document in documents[: answers - done]:
                kept = document[: draw.randrange(1, len(document) + 1)]
                question = kept + [draw.randrange(250) for _ in range(draw.randrange(1, 20))]
                params = SamplingParams(
                    max_tokens=draw.randrange(1, 40),
                    temperature=draw.choice((0.0, 0.7, 1.3)),
                    seed=draw.randrange(1000),
                    logprobs=1,
                )
                schedule = draw.choice(_SCHEDULES) if second.head else draw.choice(("auto", "plain", "lookup"))
                results = [engine.generate(question, params, schedule).run() for engine in (second, fresh)]
                differ += (results[0].ids, results[0].logprobs) != (results[1].ids, results[1].logprobs)
                done += 1
            shared += second.backend._answers.loop.counts["shared_rows"]
            file.unlink()
    print(f"{done} answers, {shared} rows of their prompts from files, {differ} differences (seed {seed})")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main(*(int(text) for text in (*sys.argv[1:], *("2000", "1")[len(sys.argv) - 1 :]))))
