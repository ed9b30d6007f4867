"""Several questions at once with asyncio: each answer is printed when it is whole, and all within a time limit.

python examples/ask_async.py "Why is the sky blue?" "Why is the sea salty?"
"""

import argparse
import asyncio

from ppsd_rt import Engine, SamplingParams


async def ask(engine: Engine, question: str, params: SamplingParams) -> str:
    messages = [{"role": "user", "content": question}]
    async with engine.agenerate(messages, params) as generation:  # cancelled with the task
        async for _ in generation:
            pass  # token.text, as it comes
    return generation.completion.text


async def ask_all(engine: Engine, questions: list[str], params: SamplingParams, seconds: float) -> list[str]:
    async with asyncio.timeout(seconds):
        return list(await asyncio.gather(*(ask(engine, question, params) for question in questions)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="+")
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    with Engine.from_pretrained(args.model) as engine:
        params = SamplingParams(max_tokens=args.max_tokens)
        for question, text in zip(
            args.questions, asyncio.run(ask_all(engine, args.questions, params, args.seconds)), strict=True
        ):
            print(f"{question}\n  {text}")


if __name__ == "__main__":
    main()
