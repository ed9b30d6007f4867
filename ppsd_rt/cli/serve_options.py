"""Options of `ppsd-run serve`."""

import argparse

from .values import address, at_most, named, positive, seconds, whole


def server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", type=named, default="127.0.0.1", help="address to listen on; 0.0.0.0: all of them")
    group.add_argument("--port", type=whole, default=8000, metavar="N", help="0: any that is free")
    group.add_argument("--model-name", type=named, metavar="NAME", help="what clients call the model [--model]")
    group.add_argument(
        "--api-key", type=named, metavar="KEY", help="that clients must bring [the variable PPSD_API_KEY; else none]"
    )
    group.add_argument(
        "--cors",
        type=named,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="whose pages may ask, such as http://localhost:3000; * is all; may be repeated",
    )
    group.add_argument("--strict", action="store_true", help="refuse unknown fields, as OpenAI does")
    group.add_argument(
        "--plain-contents",
        action="store_true",
        help="special tokens in messages are text, so that a user cannot end a turn [they are tokens]",
    )
    group.add_argument(
        "--memory",
        choices=("own", "shared", "off"),
        default="own",
        help="whose earlier answers make new ones faster: those of the same `user`, everybody's, nobody's [own]",
    )
    group = parser.add_argument_group("an engine that may be lost (answers go on with the same tokens)")
    group.add_argument(
        "--restarts", type=whole, metavar="N", help="decode in a child process, started again up to N times"
    )
    group.add_argument(
        "--engines", type=address, metavar="[HOST:]PORT", help="others start engines, which come here: ppsd-run engine"
    )
    _silence(group)
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--queue", type=at_most(10**6), metavar="N", help="answers that may wait [by memory, at least 256]"
    )
    group.add_argument(
        "--keep-alive", type=seconds, default=75.0, metavar="S", help="seconds that an idle connection stays open"
    )
    group.add_argument("--max-prompt", type=positive, metavar="N", help="tokens of a prompt [what the context holds]")
    group.add_argument("--max-answer", type=positive, metavar="N", help="tokens of an answer [what the context holds]")
    group.add_argument("--max-body", type=positive, default=4 << 20, metavar="N", help="bytes of a request")
    group.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="seconds for a request")
    group.add_argument(
        "--grace", type=seconds, default=10.0, metavar="S", help="seconds that answers have to end in after SIGTERM"
    )


def front_options(parser: argparse.ArgumentParser) -> None:
    """Of `ppsd-run engine`."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--front", type=address, required=True, metavar="HOST:PORT", help="where `ppsd-run serve --engines` listens"
    )
    group.add_argument("--once", action="store_true", help="end with the server [it may come back]")
    _silence(group)


def _silence(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--engine-timeout", type=seconds, default=10.0, metavar="S", help="an engine or a server silent so long is lost"
    )
