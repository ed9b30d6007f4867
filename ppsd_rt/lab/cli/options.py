"""Options of `watch` and `check`."""

from ...cli.parser import Parser, model_options, sampling_options, schedule_options
from ...cli.values import named, number, whole


def watch_options(parser: Parser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; - or nothing: read standard input")
    group = parser.add_argument_group(
        "what is shown: the answer is recorded first, at full speed, then replayed slowly"
    )
    group.add_argument("--slow", type=number, default=200.0, metavar="X", help="X times slower than it was")
    group.add_argument("--step", action="store_true", help="wait for Enter before each draft token and each verdict")
    group.add_argument("--svg", type=named, metavar="FILE", help="write an animation instead (one SVG file)")
    group.add_argument("--system", metavar="TEXT", help="system message [the model's own]")
    group.add_argument("--raw", action="store_true", help="do not apply the chat template")
    group.add_argument(
        "--grammar", metavar="G", help="what the answer must be: json, schema=FILE or {...}, regex=PATTERN or lark=FILE"
    )
    sampling_options(parser, max_tokens=48)
    schedule_options(parser, default="elastic")
    model_options(parser)


def check_options(parser: Parser) -> None:
    group = parser.add_argument_group("what to check")
    group.add_argument("--prompts", type=named, metavar="FILE", help="as for generating [the 34 development prompts]")
    group.add_argument("--limit", type=whole, metavar="N", help="only the first N prompts of each family [all]")
    group.add_argument("-n", "--max-tokens", type=whole, default=64, metavar="N", help="tokens per answer")
    group.add_argument(
        "--schedules", metavar="A/B/...", help="schedules to compare with plain [every named one and stop rule]"
    )
    group.add_argument("--sampling", metavar="A,B,...", help="greedy, warm, nucleus, penalty [all four]")
    group.add_argument("--raw", action="store_true", help="do not apply the chat template")
    group.add_argument("--json", action="store_true", help="print the result as one JSON object")
    group = parser.add_argument_group(
        "campaign: random engines, prompts, sampling and schedules; options of the machine that are given stay as given"
    )
    group.add_argument("--tokens", type=whole, metavar="N", help="until N tokens have been compared")
    group.add_argument("--seed", type=whole, default=0, metavar="S", help="same seed, same cases [0]")
    group.add_argument("--state", type=named, metavar="FILE", help="what has been done, to go on [in the cache folder]")
    group.add_argument("--case", type=whole, metavar="K", help="only case K, to see again what differed in it")
    model_options(parser)
