"""Options of `ppsd-run lab simulate`."""

import argparse

from ...cli.values import at_most, named, positive, probability, seconds, whole, zero_or
from .bench_options import format_option, list_of

SCHEDULES = ("plain", "eesd:length=4,stop_rule=fixed", "ppsd", "elastic")

MOST_STAGES = 256
MOST_TOKENS = 1_000_000
MOST_PASSES = 2_000_000  # tokens times stages of one case: some seconds, and some GB for the timeline


milliseconds = zero_or(1e-6, 1e9)


def each(text: str) -> list[float]:
    """Numbers that each stand for one thing; doubles stay."""
    return list(map(milliseconds, text.split(",")))


def simulate_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to simulate (lists: every combination)")
    group.add_argument(
        "--stages",
        type=list_of(at_most(MOST_STAGES)),
        metavar="N,N,...",
        help="devices in the pipeline, the first of them drafts [4]",
    )
    group.add_argument(
        "--acceptance", type=list_of(probability), default=[0.8], metavar="P,P,...", help="of a draft token [0.8]"
    )
    group.add_argument(
        "--second", type=probability, default=0.0, metavar="P", help="of its sibling, where the draft is wrong [0]"
    )
    group.add_argument(
        "--link-ms", type=list_of(milliseconds), default=[0.0], metavar="T,T,...", help="delay of every link [0]"
    )
    group.add_argument(
        "--schedule",
        action="append",
        metavar="NAME",
        help=f"as for generating, without auto; may be given several times [{', '.join(SCHEDULES)}]",
    )
    group.add_argument(
        "-n", "--tokens", type=at_most(MOST_TOKENS), default=2000, metavar="N", help="to decode in each case"
    )
    group.add_argument("--seed", type=whole, default=0, metavar="S", help="of which drafts are right [0]")
    group = parser.add_argument_group("requests at replicas of such pipelines (lists: every combination)")
    group.add_argument("--cluster", action="store_true", help="simulate them; one stage is a process [one answer]")
    count = list_of(at_most(10_000))
    group.add_argument("--replicas", type=count, default=[1], metavar="N,N,...", help="of the pipeline [1]")
    group.add_argument(
        "--batch", type=count, default=[16], metavar="N,N,...", help="answers that share a replica's passes [16]"
    )
    group.add_argument(
        "--drafts", type=list_of(whole), default=[0], metavar="K,K,...", help="before each pass; 0: plain decoding [0]"
    )
    group.add_argument(
        "--late-ms", type=milliseconds, default=0.0, metavar="T", help="beside --link-ms, on average, at random [0]"
    )
    group.add_argument("--users", type=count, metavar="N,N,...", help="who ask again when they have read the answer")
    group.add_argument("--think", type=seconds, default=20.0, metavar="S", help="of a user between two requests")
    group.add_argument(
        "--rate", type=list_of(seconds), metavar="R,R,...", help="requests a second instead, at random (Poisson)"
    )
    group.add_argument("--burst", type=positive, default=1, metavar="N", help="of these so many come together")
    group.add_argument("--prompt-tokens", type=positive, default=200, metavar="N", help="of a prompt, on average")
    group.add_argument("--answer-tokens", type=positive, default=150, metavar="N", help="of an answer, on average")
    group.add_argument(
        "--shared-tokens", type=whole, default=0, metavar="N", help="of the prompt, a beginning that others have [0]"
    )
    group.add_argument("--prefixes", type=positive, default=1, metavar="N", help="how many such beginnings there are")
    group.add_argument(
        "--prefix-room", type=positive, default=64, metavar="N", help="beginnings whose KV cache a replica keeps"
    )
    group.add_argument("--by-prefix", action="store_true", help="requests that begin alike go to one replica")
    group.add_argument("--requests", type=at_most(10**6), default=1000, metavar="N", help="to simulate in each case")
    group = parser.add_argument_group("costs of the stages (milliseconds for one row)")
    group.add_argument("--token-ms", type=milliseconds, metavar="T", help="a plain token through the whole model [20]")
    group.add_argument("--stage-ms", type=each, metavar="T,T,...", help="each stage instead, the draft stage first")
    group.add_argument("--head-ms", type=milliseconds, metavar="T", help="exit head, each time a draft is drawn [0]")
    group.add_argument(
        "--row-share",
        type=zero_or(1e-9, 1000.0),
        metavar="X",
        help="every further row of a pass adds this share of the first: 0 where reading the weights is all [0]",
    )
    group.add_argument("--bandwidth", type=zero_or(1e-6, 1e9), metavar="GBIT", help="of a link, Gbit/s [without limit]")
    group.add_argument(
        "--row-bytes", type=at_most(10**12), metavar="N", help="of a hidden state [the measured model's, 4 a value]"
    )
    group = parser.add_argument_group("measured costs: every stage is a machine like this one")
    group.add_argument("--measured", action="store_true", help="calibrate the model's layers and heads here (cpu)")
    group.add_argument("-m", "--model", type=named, default="smollm2-135m", metavar="NAME", help="as for generating")
    group.add_argument("--exit-head", type=named, default="auto", metavar="HEAD", help="as for generating")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, int8 or int4")
    group.add_argument("--threads", type=positive, metavar="N", help="CPU threads [one for each core]")
    group = parser.add_argument_group("output")
    format_option(group)
    group.add_argument(
        "--trace", type=named, metavar="FILE", help="timelines of the first combination, for ui.perfetto.dev"
    )
