"""Options of `ppsd-run serve`."""

import argparse

from .values import Add, address, at_most, group, named, positive, seconds, whole


def server_options(parser: argparse.ArgumentParser) -> None:
    add = group(parser, "server")
    add("--host", "address to listen on; 0.0.0.0: all of them", named, default="127.0.0.1")
    add("--port N", "0: any that is free", whole, default=8000)
    add("--model-name NAME", "what clients call the model [--model]", named)
    add("--api-key KEY", "that clients must bring [the variable PPSD_API_KEY; else none]", named)
    add(
        "--cors ORIGIN",
        "whose pages may ask, such as http://localhost:3000; * is all; may be repeated",
        named,
        action="append",
        default=[],
    )
    add("--strict", "refuse unknown fields, as OpenAI does")
    add("--plain-contents", "special tokens in messages are text, so that a user cannot end a turn [they are tokens]")
    add(
        "--memory",
        "whose earlier answers make new ones faster: those of the same `user`, everybody's, nobody's [own]",
        choices=("own", "shared", "off"),
        default="own",
    )
    add = group(parser, "an engine that may be lost (answers go on with the same tokens)")
    add("--restarts N", "decode in a child process, started again up to N times", whole)
    add("--engines [HOST:]PORT", "others start engines, which come here: ppsd-run engine", address)
    _silence(add)
    add = group(parser, "limits")
    add("--queue N", "answers that may wait [by memory, at least 256]", at_most(10**6))
    add("--keep-alive S", "seconds that an idle connection stays open", seconds, default=75.0)
    add("--max-prompt N", "tokens of a prompt [what the context holds]", positive)
    add("--max-answer N", "tokens of an answer [what the context holds]", positive)
    add("--max-body N", "bytes of a request", positive, default=4 << 20)
    add("--timeout S", "seconds for a request", seconds, default=600.0)
    add("--grace S", "seconds that answers have to end in after SIGTERM", seconds, default=10.0)


def front_options(parser: argparse.ArgumentParser) -> None:
    """Of `ppsd-run engine`."""
    add = group(parser, "server")
    add("--front HOST:PORT", "where `ppsd-run serve --engines` listens", address, required=True)
    add("--once", "end with the server [it may come back]")
    _silence(add)


def _silence(add: Add) -> None:
    add("--engine-timeout S", "an engine or a server silent so long is lost", seconds, default=10.0)
