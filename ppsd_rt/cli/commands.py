"""The table of commands: the one place that knows where each is, those of `ppsd_rt.bench` included.

A command is imported when it is used. The product imports nothing of `ppsd_rt.bench` otherwise.
`lab NAME` are those of people who work on the runtime, or choose machines for it.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from ..bench.cli import options as bench
from . import options

if TYPE_CHECKING:
    from .common import NamedPrompt


@dataclass(frozen=True)
class Command:
    """options: gives a parser those of the command. place: `module:name`, the module within `ppsd_rt`, of what runs it:
    a function of the arguments that gives the exit status, or None."""

    summary: str
    examples: tuple[str, str]
    options: Callable[[ArgumentParser], None]
    place: str

    def load(self) -> Callable[[Namespace], int | None]:
        module, _, name = self.place.partition(":")
        return cast(Callable[[Namespace], int | None], getattr(import_module(f"..{module}", __package__), name))


COMMANDS = {
    "generate": Command(
        "answer a prompt (the default command)",
        ('ppsd-run "Why is the sky blue?"', 'cat notes.txt | ppsd-run "Summarise these notes."'),
        options.generate_options,
        "cli.generate:run",
    ),
    "watch": Command(
        "show slowly how an answer is drafted and verified",
        ('ppsd-run watch "Why is the sky blue?"', 'ppsd-run watch --svg sky.svg "Why is the sky blue?"'),
        bench.watch_options,
        "bench.cli.watch:run",
    ),
    "serve": Command(
        "answer over HTTP, as OpenAI's API does",
        ("ppsd-run serve --port 8000", "ppsd-run serve -m model.gguf --host 0.0.0.0 --api-key secret"),
        options.serve_options,
        "cli.serve:run",
    ),
    "engine": Command(
        "decode for a server that is another process and outlives this one",
        (
            "ppsd-run engine --front 127.0.0.1:7000",
            "ppsd-run engine --front HOST:7000 -m model.gguf --engine-timeout 30",
        ),
        options.engine_options,
        "cli.front:run_engine",
    ),
    "list": Command(
        "list the models that are here: in the cache folder and in the hub's cache",
        ("ppsd-run list", "ppsd-run list --json"),
        options.list_options,
        "cli.cache:list_models",
    ),
    "rm": Command(
        "remove a model that is here",
        ("ppsd-run rm smollm2-135m", "ppsd-run rm org/name --yes"),
        options.rm_options,
        "cli.cache:remove",
    ),
    "pull": Command(
        "fetch a model into the cache",
        ("ppsd-run pull HuggingFaceTB/SmolLM2-360M-Instruct", "ppsd-run pull org/name:Q4_K_M"),
        options.pull_options,
        "cli.cache:pull",
    ),
    "distill": Command(
        "train an exit head on text that the model writes itself",
        (
            "ppsd-run distill -m my-model/ --out head.safetensors",
            "ppsd-run distill -m my-model/ --kind ngram --out table.safetensors",
        ),
        options.distill_options,
        "cli.distill:run",
    ),
    "learn": Command(
        "train the exit head on answers that were kept with --learn",
        ("ppsd-run learn answers/", "ppsd-run learn --status answers/"),
        options.learn_options,
        "cli.learn:run",
    ),
    "check": Command(
        "prove that speculation changes no token",
        ("ppsd-run check --schedule eesd --schedule elastic", "ppsd-run check --limit 1"),
        bench.check_options,
        "bench.cli.check:run",
    ),
    "heads": Command(
        "compare exit heads: acceptance, cost, predicted speed",
        ("ppsd-run heads auto norm:10", "ppsd-run heads auto head-3.safetensors --plot heads.svg"),
        bench.heads_options,
        "bench.cli.heads:run",
    ),
    "cache": Command(
        "list or empty the cache folder",
        ("ppsd-run cache", "ppsd-run cache --clean learned"),
        options.cache_options,
        "cli.cache:run",
    ),
    "info": Command(
        "show model, exit head, formats and machine",
        ("ppsd-run info", "ppsd-run info -m model.gguf --json"),
        options.info_options,
        "cli.info:run",
    ),
    "lab bench": Command(
        "measure kernels or whole answers",
        (
            "ppsd-run lab bench generate -p 64 -n 128 --schedule eesd",
            "ppsd-run lab bench kernels -t 1,2 --rows 1,4,8 --dtype int8",
        ),
        bench.bench_options,
        "bench.cli.bench:run",
    ),
    "lab simulate": Command(
        "predict a pipeline's speed from the seconds of its stages",
        (
            "ppsd-run lab simulate --stages 2,4,8 --acceptance 0.6,0.8",
            "ppsd-run lab simulate --stage-ms 2,6,6,6 --schedule ppsd",
        ),
        bench.simulate_options,
        "bench.cli.simulate:run",
    ),
    "lab eval": Command(
        "measure what a number format costs in quality",
        ("ppsd-run lab eval --dtype bfloat16,int8", "ppsd-run lab eval --text mine.txt --dtype int8,int4"),
        bench.eval_options,
        "bench.cli.eval:run",
    ),
}


def prompt_reader() -> "Callable[[str | None], list[NamedPrompt]]":
    """Reads a file of prompts; None: the development prompts."""
    from ..bench.cli.prompt_files import read_prompts

    return read_prompts
