"""Options of `ppsd-run lab simulate`."""

import argparse

from ...cli.values import at_most, group, named, positive, probability, seconds, whole, zero_or
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
    add = group(parser, "what to simulate (lists: every combination)")
    add("--stages N,N,...", "devices in the pipeline, the first of them drafts [4]", list_of(at_most(MOST_STAGES)))
    add("--acceptance P,P,...", "of a draft token [0.8]", list_of(probability), default=[0.8])
    add("--second P", "of its sibling, where the draft is wrong [0]", probability, default=0.0)
    add("--link-ms T,T,...", "delay of every link [0]", list_of(milliseconds), default=[0.0])
    add(
        "--schedule NAME",
        f"as for generating, without auto; may be given several times [{', '.join(SCHEDULES)}]",
        action="append",
    )
    add("-n --tokens N", "to decode in each case", at_most(MOST_TOKENS), default=2000)
    add("--seed S", "of which drafts are right [0]", whole, default=0)
    add = group(parser, "requests at replicas of such pipelines (lists: every combination)")
    add("--cluster", "simulate them; one stage is a process [one answer]")
    count = list_of(at_most(10_000))
    add("--replicas N,N,...", "of the pipeline [1]", count, default=[1])
    add("--batch N,N,...", "answers that share a replica's passes [16]", count, default=[16])
    add("--drafts K,K,...", "before each pass; 0: plain decoding [0]", list_of(whole), default=[0])
    add("--late-ms T", "beside --link-ms, on average, at random [0]", milliseconds, default=0.0)
    add("--users N,N,...", "who ask again when they have read the answer", count)
    add("--think S", "of a user between two requests", seconds, default=20.0)
    add("--rate R,R,...", "requests a second instead, at random (Poisson)", list_of(seconds))
    add("--burst N", "of these so many come together", positive, default=1)
    add("--prompt-tokens N", "of a prompt, on average", positive, default=200)
    add("--answer-tokens N", "of an answer, on average", positive, default=150)
    add("--shared-tokens N", "of the prompt, a beginning that others have [0]", whole, default=0)
    add("--prefixes N", "how many such beginnings there are", positive, default=1)
    add("--by-prefix", "requests that begin alike go to one replica")
    add("--prefix-room N", "beginnings whose KV cache a replica keeps", positive, default=64)
    add("--requests N", "to simulate in each case", at_most(10**6), default=1000)
    add = group(parser, "costs of the stages (milliseconds for one row)")
    add("--token-ms T", "a plain token through the whole model [20]", milliseconds)
    add("--stage-ms T,T,...", "each stage instead, the draft stage first", each)
    add("--head-ms T", "exit head, each time a draft is drawn [0]", milliseconds)
    add(
        "--row-share X",
        "every further row of a pass adds this share of the first: 0 where reading the weights is all [0]",
        zero_or(1e-9, 1000.0),
    )
    add("--bandwidth GBIT", "of a link, Gbit/s [without limit]", zero_or(1e-6, 1e9))
    add("--row-bytes N", "of a hidden state [the measured model's, 4 a value]", at_most(10**12))
    add = group(parser, "measured costs: every stage is a machine like this one")
    add("--measured", "calibrate the model's layers and heads here (cpu)")
    add("-m --model NAME", "as for generating", named, default="smollm2-135m")
    add("--exit-head HEAD", "as for generating", named, default="auto")
    add("--dtype", "auto, float32, bfloat16, int8 or int4", default="auto")
    add("--threads N", "CPU threads [one for each core]", positive)
    add = group(parser, "output")
    format_option(add)
    add("--trace FILE", "timelines of the first combination, for ui.perfetto.dev", named)
