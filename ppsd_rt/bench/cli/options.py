"""Options of the lab's commands. Most of `bench`, `eval` and `simulate` take lists, and every combination is taken."""

import argparse

from ...cli.options import model_options, sampling_options, schedule_options
from ...cli.values import Add, at_most, group, named, number, positive, probability, several, whole, zero_or
from ..simulate import MOST_STAGES

_OFF = "off"
words = several(named)


def acceptance(text: str) -> float | None:
    """A probability; None, the exit head's own drafts, for `off`."""
    return None if text == _OFF else probability(text)


def bench_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    kernels = "single kernels of the C++ backend or, with --device cuda, of the CUDA one"
    answers = "whole answers, every schedule against plain"
    for name, summary, example, options in (
        ("kernels", kernels, "-t 1,2 --rows 1,4,8 --dtype int8,bfloat16", _kernel_options),
        ("generate", answers, "-p 64,512 --schedule eesd", _generation_options),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=f"Measure {summary}. Cases take turns; figures are medians, ± is half the range.",
            epilog=f"example: ppsd-run lab bench {name} {example}",
            formatter_class=parser.formatter_class,
            allow_abbrev=False,
        )
        options(command)
        _model_options(command)
        add = group(command, "output")
        add("-r --repeats N", "of every case", positive, default=5)
        format_option(add)


def _kernel_options(parser: argparse.ArgumentParser) -> None:
    add = group(parser, "what to measure (lists: every combination)")
    numbers = several(positive)
    add("--kernels A,B,...", "qkv, lm_head, ... [all]", words, default=[])
    add("--rows N,N,...", "[1,2,4,8,16]", numbers, default=[1, 2, 4, 8, 16])
    add("--isa A,B,...", "instruction sets, or all [the best]", words, default=[])
    add("--device", "cpu, or cuda or cuda:N: the Triton kernels on a GPU [cpu]", default="cpu")
    add("--context N", "rows in the KV cache", positive, default=256)
    add("--dtype A,B,...", "number formats [auto]", words, default=["auto"])


def _generation_options(parser: argparse.ArgumentParser) -> None:
    add = group(parser, "what to measure (lists: every combination)")
    numbers = several(positive)
    add("-p --prompt-tokens N,N,...", "lengths of a made-up prompt [64]", numbers)
    what = "answer a file of prompts instead, up to the end of the text [the 34 development prompts]"
    add("--prompts FILE", what, named, nargs="?", const=True)
    add("--limit N", "only the first N prompts of each family [all]", positive)
    add("-n --max-tokens N,N,...", "per answer [128]", numbers, default=[128])
    what = "as for generating; may be given several times; plain is always measured [auto, with an exit head]"
    add("--schedule NAME", what, action="append")
    what = f"draft the right token with probability P instead; {_OFF}: the exit head's own drafts [{_OFF}]"
    add("--oracle P,P,...", what, several(acceptance), default=[None])
    add("--dtype A,B,...", "number formats [auto]", words, default=["auto"])
    kv_option(add)
    add("--backend", "auto, cpu (C++), cuda (Triton, captured) or torch", default="auto")
    add("--device", "auto, cpu, cuda or cuda:N", default="auto")
    add("--temperature T", "0 is greedy [0]", number, default=0.0)
    add("--seed S", "of the sampling [0]", whole, default=0)


def kv_option(add: Add) -> None:
    add("--kv-dtype A,B,...", "of the KV cache, with each of these [auto]", words, default=["auto"])


def _model_options(parser: argparse.ArgumentParser) -> None:
    add = group(parser, "model and machine")
    add("-m --model NAME", "as for generating", named, default="smollm2-135m")
    add("--exit-head HEAD", "as for generating", named, default="auto")
    add("-t --threads N,N,...", "CPU threads [one for each core]", several(positive))


def format_option(add: Add) -> None:
    what = "table, md, csv, json (one object with everything) or jsonl (a row a line, then the summary)"
    add("-o --output", what, choices=("table", "md", "csv", "json", "jsonl"), default="table")
    add("--save FILE", "write everything, as with -o json, into a file", named)


def heads_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("heads", nargs="+", metavar="HEAD", help="files, or as for --exit-head: auto, norm:E")
    add = group(parser, "what to measure")
    add("--prompts FILE", "as for generating [the 34 development prompts]", named)
    add("--limit N", "only the first N prompts of each family [all]", positive)
    add("-n --max-tokens N", "tokens per answer [256]", positive, default=256)
    add("--length K", "drafts in a round, at most 15 [6]", positive, default=6)
    add("--plot FILE", "acceptance against cost, with lines of equal speed; .svg or .png", named)
    add = group(parser, "model and machine")
    add("-m --model NAME", "as for generating", named, default="smollm2-135m")
    add("--dtype", "auto, float32, bfloat16, int8 or int4", default="auto")
    add("--threads N", "CPU threads [one for each core]", positive)
    format_option(group(parser, "output"))


def eval_options(parser: argparse.ArgumentParser) -> None:
    add = group(parser, "what to measure")
    what = "number formats, each as FORMAT or BACKEND:FORMAT [bfloat16,int8,int4]"
    add("--dtype A,B,...", what, words, default=["bfloat16", "int8", "int4"])
    kv_option(add)
    add("--against FORMAT", "what is taken for right", default="float32")
    add("--text FILE", "a text of some thousand tokens [the one that comes with it]", named)
    add("--window N", "tokens that the model sees at a time", positive, default=512)
    add = group(parser, "model and machine")
    add("-m --model NAME", "as for generating", named, default="smollm2-135m")
    add("--backend", "auto, cpu (C++), cuda (Triton, captured) or torch", default="auto")
    add("--device", "auto, cpu, cuda or cuda:N", default="auto")
    add("--threads N", "CPU threads [one for each core]", positive)
    format_option(group(parser, "output"))


SCHEDULES = ("plain", "eesd:length=4,stop_rule=fixed", "ppsd", "elastic")

MOST_TOKENS = 100_000  # some seconds


milliseconds = zero_or(1e-6, 1e9)


def each(text: str) -> list[float]:
    """Numbers that each stand for one thing; doubles stay."""
    return list(map(milliseconds, text.split(",")))


def simulate_options(parser: argparse.ArgumentParser) -> None:
    add = group(parser, "what to simulate (lists: every combination)")
    add("--stages N,N,...", "devices in the pipeline, the first of them drafts [4]", several(at_most(MOST_STAGES)))
    add("--acceptance P,P,...", "of a draft token [0.8]", several(probability), default=[0.8])
    add("--link-ms T,T,...", "delay of every link [0]", several(milliseconds), default=[0.0])
    add(
        "--schedule NAME",
        f"as for generating, without auto, copies and stop rules; may be given several times [{', '.join(SCHEDULES)}]",
        action="append",
    )
    add("-n --tokens N", "to decode in each case", at_most(MOST_TOKENS), default=2000)
    add("--seed S", "of which drafts are right [0]", whole, default=0)
    add = group(parser, "seconds of the stages (milliseconds for one row)")
    add("--token-ms T", "a plain token through the whole model [20]", milliseconds)
    add("--stage-ms T,T,...", "each stage instead, the draft stage first", each)
    add("--head-ms T", "exit head, each time a draft is drawn [0]", milliseconds, default=0.0)
    add(
        "--row-share X",
        "every further row of a pass adds this share of the first: 0 where reading the weights is all [0]",
        zero_or(1e-9, 1000.0),
        default=0.0,
    )
    format_option(group(parser, "output"))


def watch_options(parser: argparse.ArgumentParser) -> None:
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


def check_options(parser: argparse.ArgumentParser) -> None:
    add = group(parser, "what to check")
    add("--prompts FILE", "as for generating [the 34 development prompts]", named)
    add("--limit N", "only the first N prompts of each family [all]", positive)
    add("-n --max-tokens N", "tokens per answer", whole, default=64)
    what = "to compare with plain; may be given several times [every named one and stop rule]"
    add("--schedule NAME", what, action="append")
    add("--sampling A,B,...", "greedy, warm, nucleus, penalty [all four]")
    add("--raw", "do not apply the chat template")
    add("--json", "print the result as one JSON object")
    model_options(parser)
