"""Options of `ppsd-run lab bench` and `lab eval`: most of them take lists, and every combination is measured."""

import argparse
from collections.abc import Callable
from typing import TypeVar

from ...cli.values import Add, group, named, number, positive, probability, whole
from ...printable import quoted

Item = TypeVar("Item")
_OFF = "off"


def list_of(item: Callable[[str], Item]) -> Callable[[str], list[Item]]:
    """For argparse: `A,B,...`, without doubles."""

    def parse(text: str) -> list[Item]:
        return list(dict.fromkeys(map(item, text.split(","))))

    parse.__name__ = "list"
    return parse


def words(text: str) -> list[str]:
    """For argparse: a list of names."""
    if not all(text.split(",")):
        raise argparse.ArgumentTypeError(f"{quoted(text)} has an empty item")
    return list(dict.fromkeys(text.split(",")))


def acceptance(text: str) -> float | None:
    """`off`: the exit head's own drafts."""
    if text == _OFF:
        return None
    try:
        return probability(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {_OFF}") from None


def bench_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, summary, example, options in (
        (
            "kernels",
            "single kernels of the C++ backend or, with --device cuda, of the CUDA one",
            "-t 1,2 --rows 1,4,8 --dtype int8,bfloat16",
            _kernel_options,
        ),
        ("generate", "whole answers, every schedule against plain", "-p 64,512 --schedule eesd", _generation_options),
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
        _output_options(command)


def _kernel_options(parser: argparse.ArgumentParser) -> None:
    add = group(parser, "what to measure (lists: every combination)")
    numbers = list_of(positive)
    add("--kernels A,B,...", "qkv, lm_head, ... [all]", words, default=[])
    add("--rows N,N,...", "[1,2,4,8,16]", numbers, default=[1, 2, 4, 8, 16])
    add("--isa A,B,...", "instruction sets, or all [the best]", words, default=[])
    add("--device", "cpu, or cuda or cuda:N: the Triton kernels on a GPU [cpu]", default="cpu")
    add("--context N", "rows in the KV cache", positive, default=256)
    add("--dtype A,B,...", "number formats [auto]", words, default=["auto"])


def _generation_options(parser: argparse.ArgumentParser) -> None:
    add = group(parser, "what to measure (lists: every combination)")
    numbers = list_of(positive)
    add("-p --prompt-tokens N,N,...", "lengths of a made-up prompt [64]", numbers)
    add(
        "--prompts FILE",
        "answer a file of prompts instead, up to the end of the text [the 34 development prompts]",
        named,
        nargs="?",
        const=True,
    )
    add("--limit N", "only the first N prompts of each family [all]", positive)
    add("-n --max-tokens N,N,...", "per answer [128]", numbers, default=[128])
    add(
        "--schedule NAME",
        "as for generating; may be given several times; plain is always measured [auto, with an exit head]",
        action="append",
    )
    add(
        "--oracle P,P,...",
        f"draft the right token with probability P instead; {_OFF}: the exit head's own drafts [{_OFF}]",
        list_of(acceptance),
        default=[None],
    )
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
    add("-t --threads N,N,...", "CPU threads [one for each core]", list_of(positive))


def _output_options(parser: argparse.ArgumentParser) -> None:
    add = group(parser, "output")
    add("-r --repeats N", "of every case", positive, default=5)
    format_option(add)


def format_option(add: Add) -> None:
    add(
        "-o --output",
        "table, md, csv, json (one object with everything) or jsonl (a row a line, then the summary)",
        choices=("table", "md", "csv", "json", "jsonl"),
        default="table",
    )
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
    add(
        "--dtype A,B,...",
        "number formats, each as FORMAT or BACKEND:FORMAT [bfloat16,int8,int4]",
        words,
        default=["bfloat16", "int8", "int4"],
    )
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
