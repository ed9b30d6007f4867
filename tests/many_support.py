"""Eight answers at once, of which each wants something else."""

from ppsd_rt import SamplingParams
from ppsd_rt.sampling.grammar import Grammar

EIGHT = (
    {
        "grammar": Grammar(
            "json_schema", '{"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}'
        )
    },
    {"repetition_penalty": 1.3, "temperature": 0.7, "seed": 2},
    {"presence_penalty": 0.9, "frequency_penalty": 0.4, "logprobs": 2},
    {"logprobs": 3, "temperature": 1.1, "top_k": 20, "top_p": 0.9, "seed": 4},
    {"logit_bias": {40: 4.0}, "min_p": 0.05, "temperature": 1.0, "seed": 5},
    {"temperature": 1.3, "seed": 6},
    {"grammar": Grammar("regex", "[a-f]{5,30}!"), "temperature": 1.0, "seed": 7, "logprobs": 0},
    {},
)


def check_eight(engine, schedule, tokens=30):
    """With schemas, penalties, log-probabilities, and one that is cancelled in the middle; plain decoding's tokens."""
    asked = [SamplingParams(**{"max_tokens": tokens, **options}) for options in EIGHT]
    prompts = ["the same beginning, " * 4 + "and more"[:number] for number in range(8)]
    alone = [engine.generate(prompt, each, "plain").run() for prompt, each in zip(prompts, asked, strict=True)]
    together = [engine.generate(prompt, each, schedule) for prompt, each in zip(prompts, asked, strict=True)]
    streams = [generation.events() for generation in together]
    for place in range(tokens + 10):
        for number, stream in enumerate(streams):
            next(stream, None)
            if (place, number) == (1, 7):  # of the tokens it has 4 at the most
                together[7].cancel()
    for generation, expected in zip(together[:7], alone[:7], strict=True):
        found = generation.run()
        assert (found.ids, found.text, found.logprobs) == (expected.ids, expected.text, expected.logprobs)
    assert together[7].completion.finish_reason == "cancelled"
    assert together[7].completion.ids == alone[7].ids[: len(together[7].completion.ids)]
