"""Options of `ppsd-run serve`."""

import argparse

from .values import at_most, named, positive, seconds, whole


def serve_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", type=named, default="127.0.0.1", help="address to listen on; 0.0.0.0: all of them")
    group.add_argument("--port", type=whole, default=8000, metavar="N", help="0: any that is free")
    group.add_argument("--model-name", type=named, metavar="NAME", help="what clients call the model [--model]")
    group.add_argument(
        "--api-key", type=named, metavar="KEY", help="that clients must bring [the variable PPSD_API_KEY; else none]"
    )
    group = parser.add_argument_group("limits")
    group.add_argument("--queue", type=at_most(10**6), default=64, metavar="N", help="answers that may wait")
    group.add_argument("--max-prompt", type=positive, metavar="N", help="tokens of a prompt [what the context holds]")
    group.add_argument("--max-answer", type=positive, metavar="N", help="tokens of an answer [what the context holds]")
    group.add_argument("--max-body", type=positive, default=4 << 20, metavar="N", help="bytes of a request")
    group.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="seconds for a request")
    group.add_argument(
        "--grace", type=seconds, default=10.0, metavar="S", help="seconds that answers have to end in after SIGTERM"
    )
