"""Options of `watch` and `check`."""

from ...cli.parser import Parser, model_options, sampling_options, schedule_options
from ...cli.values import group, named, number, whole


def watch_options(parser: Parser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; - or nothing: read standard input")
    add = group(parser, "what is shown: the answer is recorded first, at full speed, then replayed slowly")
    add("--slow X", "X times slower than it was", number, default=200.0)
    add("--step", "wait for Enter before each draft token and each verdict")
    add("--svg FILE", "write an animation instead (one SVG file)", named)
    add("--system TEXT", "system message [the model's own]")
    add("--raw", "do not apply the chat template")
    add("--grammar G", "what the answer must be: json, schema=FILE or {...}, regex=PATTERN or lark=FILE")
    sampling_options(parser, max_tokens=48)
    schedule_options(parser, default="elastic")
    model_options(parser)


def check_options(parser: Parser) -> None:
    add = group(parser, "what to check")
    add("--prompts FILE", "as for generating [the 34 development prompts]", named)
    add("--limit N", "only the first N prompts of each family [all]", whole)
    add("-n --max-tokens N", "tokens per answer", whole, default=64)
    add("--schedules A/B/...", "schedules to compare with plain [every named one and stop rule]")
    add("--sampling A,B,...", "greedy, warm, nucleus, penalty [all four]")
    add("--raw", "do not apply the chat template")
    add("--json", "print the result as one JSON object")
    add = group(
        parser,
        "campaign: random engines, prompts, sampling and schedules; given options of the machine stay as given",
    )
    add("--tokens N", "until N tokens have been compared", whole)
    add("--seed S", "same seed, same cases [0]", whole, default=0)
    add("--state FILE", "what has been done, to go on [in the cache folder]", named)
    add("--case K", "only case K, to see again what differed in it", whole)
    model_options(parser)
