"""Speculative decoding in a loop of your own, on the stages of an engine; the ids are those of plain decoding.

python examples/own_loop.py --backend torch "Why is the sky blue?"
"""

import argparse

from ppsd_rt import Engine, PpsdError, SamplingParams
from ppsd_rt.generation import Prompt


def own_loop(engine: Engine, prompt: Prompt, params: SamplingParams, least: float = 0.4) -> tuple[list[int], int]:
    """The answer's ids, and how many passes it took after the prompt's. least: confidence of drafts to verify."""
    stages = engine.stages(params)
    answer, passes = [stages.prefill(prompt)], 0
    room = engine.config.max_position_embeddings - stages.committed
    room = min(params.max_tokens or room, room)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else engine.config.eos_token_ids)}
    while len(answer) < room and answer[-1] not in ends:
        rows = [answer[-1]]  # the newest token has passed no layer yet
        while len(rows) < min(8, room - len(answer)):
            draft = stages.draft(rows[-1:])
            if draft.confidence < least:
                break
            rows.append(draft.token)
        own = stages.verify(rows)
        count = 1  # rows that are right: the newest token, and drafts as long as they are the model's own ids
        while count < len(rows) and rows[count] == own[count - 1] and rows[count] not in ends:
            count += 1
        stages.commit(count)
        answer += own[:count]
        passes += 1
    return answer, passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto", choices=["auto", "cpu", "torch"])
    parser.add_argument("--exit-head", default="auto")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    try:
        engine = Engine.from_pretrained(args.model, backend=args.backend, exit_head=args.exit_head)
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
        prompt = [{"role": "user", "content": args.prompt}]
        ids, passes = own_loop(engine, prompt, params)
        plain = engine.chat(args.prompt, params, "plain").run()
    except PpsdError as error:
        raise SystemExit(f"own_loop: {error}") from None
    print(engine.tokenizer.decode(ids))
    print(f"{len(ids)} tokens, {(len(ids) - 1) / max(passes, 1):.2f} per pass")
    if tuple(ids) != plain.ids:
        raise SystemExit("own_loop: these are not the ids of plain decoding")
    print("the ids of plain decoding: yes")


if __name__ == "__main__":
    main()
