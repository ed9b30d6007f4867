"""Options of every command but the lab's. Nothing here imports torch, so that `--help` answers at once."""

from argparse import SUPPRESS, ArgumentParser
from typing import Any

from .values import (
    address,
    at_most,
    group,
    length,
    named,
    number,
    option,
    positive,
    seconds,
    setting,
    several,
    silence,
    whole,
)

ALL = "all"
MODELS = "models"
FILES = {  # kind: its subfolder, and what our files in it are called
    "learned": ("learned", ("*.json", ".ppsd-*")),
    "importance": ("importance", ("*.npy", ".ppsd-*")),
    "hashes": ("hashes", ("*.hash", ".ppsd-*")),
    "packed": ("packed", ("*.packed", "*.unfinished")),
    "chat": ("chat", ("history.*",)),
    "benchmarks": ("benchmarks", ("*.gguf", "*/*.json", "*/*.safetensors")),
}

_SILENCE = "an engine or a server silent so long is lost", seconds
_MANY: dict[str, Any] = {"action": "append", "default": []}  # of an option that may be given several times


def _stages(text: str) -> int | tuple[int, ...]:
    numbers = tuple(map(whole, text.split(",")))
    return numbers if len(numbers) > 1 else numbers[0]


def model_options(parser: ArgumentParser) -> None:
    add = group(parser, "model")
    what = "a local folder, a .gguf file, a hub name (org/name), or the default model"
    add("-m --model NAME", what, named, default="smollm2-135m")
    what = "a head's file; the folder or hub name of an EAGLE-3 head; auto: the one that ships for this model; norm:E: "
    add("--exit-head HEAD", what + "the model's own norm and LM head after layer E; none", named, default="auto")
    add = group(parser, "machine")
    add("--backend", "auto, cpu (C++), cuda (Triton, captured) or torch", default="auto")
    add("--device", "auto, cpu, cuda, cuda:N, or several GPUs with some layers each: cuda:0,cuda:1", default="auto")
    add("--dtype", "auto, float32, bfloat16, int8 and int4 (cpu, cuda), fp8 (cuda), float16 (torch)", default="auto")
    add(
        "--kv-dtype",
        "of the KV cache (cpu): auto (of the weights; int4: int8), float32, bfloat16, int8",
        default="auto",
    )
    add("--kv-memory SIZE", "for the KV caches of all answers, such as 4G [half of what is spare]")
    add(
        "--threads N",
        "CPU threads [one for each physical core, at most 16; fewer where a container grants less]",
        whole,
    )
    what = "a variable of the chat template, such as enable_thinking=false; `ppsd-run info` lists them"
    add("--template-set NAME=JSON", what, setting, **_MANY)
    what = (
        "cut verification into N stages (cpu, cuda); over ranks or several devices A,B,...: layers for each of them, "
    )
    add("--stages N", what + "else as is best", _stages, default=1)
    add = group(parser, "ranks (over several hosts: torchrun ... -m ppsd_rt ...)")
    add("--ranks N", "share the layers out among N processes of this host", whole)
    add("--rank-timeout S", "a rank silent so long is lost", silence, default=20.0)
    add("--link-ms T", "delay every message, to try it out [0]", number, default=0.0)


def schedule_options(parser: ArgumentParser, default: str = "auto") -> None:
    from ..pipeline.schedule import NAMES  # with numpy, which `ppsd-run --version` does not need
    from ..pipeline.stop_rules import STOP_RULES

    what = (
        f"{', '.join(NAMES)}, with changes as in eesd:length=4,stop_rule=confidence=0.5 or lookup:lookup=2; stop "
        f"rules: {', '.join(STOP_RULES)}; auto is the best on this machine, plain decoding included"
    )
    group(parser, "schedule (changes the speed, never the answer)")("--schedule NAME", what, default=default)


def sampling_options(parser: ArgumentParser, max_tokens: int | None = None) -> None:
    add = group(parser, "sampling")
    what = "end after N tokens; -1 or inf: at the end of the context" + " [-1]" * (max_tokens is None)
    add("-n --max-tokens N", what, length, default=max_tokens)
    add("-t --temperature T", "0 is greedy [0]", number, default=0.0)
    add("--top-k K", "keep the K most likely tokens; 0: all [0]", whole, default=0)
    add("--top-p P", "keep the likeliest with probability P", number, default=1.0)
    add("--min-p P", "keep those with P x the best's [0]", number, default=0.0)
    add("--repetition-penalty R", "above 1: repeat less", number, default=1.0)
    add("--presence-penalty R", "off logits of ids answered [0]", number, default=0.0)
    add("--frequency-penalty R", "the same, each time [0]", number, default=0.0)
    add("--seed S", "same seed, same answer [drawn for every answer; --json shows it]", whole)
    add("--stop TEXT", "end before this text; may be given several times", **_MANY)


def generate_options(parser: ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; what is piped into the command follows it")
    add = group(parser, "input and output")
    add("-f --file FILE", "a text before the prompt; may be given several times", named, **_MANY)
    what = 'answer each line: a text, {"prompt": ...} or {"messages": [...]}, both with "id" if wanted; files of '
    add("--prompts FILE", what + "HumanEval, GSM8K, MT-Bench, XSum, CNN/DM and WMT too; -: standard input", named)
    add("--chat", "a conversation; from a pipe each line is a turn")
    add("--system TEXT", "system message [the model's own]")
    add("--raw", "do not apply the chat template")
    add("--plain", "on a terminal: the text as it is, Markdown not rendered")
    add("--json", "print one JSON object per answer")
    add("--grammar G", "what the answer must be: json, schema=FILE or {...}, regex=PATTERN or lark=FILE")
    add("--logprobs N", "with --json: log-probabilities of the tokens and of the N likeliest", whole)
    add("--show-drafts", "colour drafted, accepted and corrected tokens")
    add("--prompt-cache FILE", "begin with the prompts that are kept there, and keep those of now [none]", named)
    add("--trace FILE", "write a timeline of the stages, for ui.perfetto.dev", named)
    add("-q --quiet", "no statistics and no notes: the answer, and errors")
    add("--compare", "also decode it with and without speculation in turns, and print how much faster it was")
    add("--explain", "print what auto predicted and what it measured")
    sampling_options(parser)
    schedule_options(parser)
    _keep_option(parser)
    model_options(parser)


def serve_options(parser: ArgumentParser) -> None:
    add = group(parser, "server")
    add("--host", "address to listen on; 0.0.0.0: all of them", named, default="127.0.0.1")
    add("--port N", "0: any that is free", whole, default=8000)
    add("--model-name NAME", "what clients call the model [--model]", named)
    add("--api-key KEY", "that clients must bring, or several in quotes [the variable PPSD_API_KEY; else none]", named)
    add("--cors ORIGIN", "whose pages may ask, as http://localhost:3000; * is all; may be repeated", named, **_MANY)
    add("--strict", "refuse unknown fields, as OpenAI does")
    add("--plain-contents", "special tokens in messages are text, so that a user cannot end a turn [they are tokens]")
    what = "whose earlier answers make new ones faster: those of the same owner, everybody's, nobody's [own]"
    add("--memory", what, choices=("own", "shared", "off"), default="own")
    add("--prompt-cache FOLDER", "the same after a restart: keep there what prompts have been read [none]", named)
    add = group(parser, "an engine that may be lost (answers go on with the same tokens)")
    add("--restarts N", "decode in a child process, started again up to N times", whole)
    add("--engines [HOST:]PORT", "others start engines, which come here: ppsd-run engine", address)
    add("--engine-timeout S", *_SILENCE, default=10.0)
    add = group(parser, "sampling of requests that say nothing of it [the model's generation_config.json]")
    add("-t --temperature T", "0 is greedy [1]", number)
    add("--top-k K", "keep the K most likely tokens; 0: all [0]", whole)
    add("--top-p P", "keep the likeliest with probability P [1]", number)
    add("--min-p P", "keep those with P x the best's [0]", number)
    add("--repetition-penalty R", "above 1: repeat less [1]", number)
    add = group(parser, "limits")
    add("--queue N", "answers that may wait [by memory, at least 256]", at_most(10**6))
    add("--keep-alive S", "seconds that an idle connection stays open", seconds, default=75.0)
    add("--max-prompt N", "tokens of a prompt [what the context holds]", positive)
    add("--max-answer N", "tokens of an answer [what the context holds]", positive)
    add("--max-body N", "bytes of a request", positive, default=4 << 20)
    add("--timeout S", "seconds for a request", seconds, default=600.0)
    add("--grace S", "seconds that answers have to end in after SIGTERM", seconds, default=10.0)
    schedule_options(parser)
    _keep_option(parser)
    model_options(parser)


def engine_options(parser: ArgumentParser) -> None:
    add = group(parser, "server")
    add("--front HOST:PORT", "where `ppsd-run serve --engines` listens", address, required=True)
    add("--once", "end with the server [it may come back]")
    add("--engine-timeout S", *_SILENCE, default=10.0)
    model_options(parser)


def list_options(parser: ArgumentParser) -> None:
    option(parser, "--json", "print one JSON object for each model")


def rm_options(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="as `ppsd-run list` names it")
    option(parser, "--yes", "do not ask")


def pull_options(parser: ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="the default model or a hub name")


def distill_options(parser: ArgumentParser) -> None:
    add = group(parser, "what to train")
    what = "one head for each, in one pass; 0: on the embeddings [a tenth of the layers: 3 for the default model]"
    add("--exit-layer E[,E...]", what, several(whole))
    kinds = "one head of each, in the same pass: feedback, layer, two-layer, adapter; ngram: only count, in minutes"
    add("--kind KIND[,KIND...]", kinds, several(named), default="feedback")
    what = "a head to go on from; none: the model's last layers [with --prompts the head that ships, else none]"
    add("--begin HEAD", what, named)
    add("--draft-vocabulary N[,N...]", "most frequent ids; 0: all", several(whole), default="4096")
    add("--intermediate-size N", "neurons of its MLP; 0: as the model [by its width]", whole)
    add("--feedback-rank R", "of its feedback matrices; 0: full [by the same]", whole)
    add("--tap LAYER", "a layer in the middle that a feedback head hears; 0: none [as --begin's, else 0]", whole)
    add("--out FILE.safetensors", "several heads: FILE[-KIND][-E][-vN].safetensors", named, required=True)
    add = group(parser, "data and training")
    what = "prompts like those that the head is for, one a line or as JSON lines: the model answers them too, and a "
    add("--prompts FILE", what + "tenth of them judges the head", named)
    add("--prompts-share S", "of the texts that answer --prompts [0.5]", number, default=0.5)
    what = "to sample from the model; rounded up to whole shards, 1024 for each slot [2000000]"
    add("--tokens N", what, at_most(10**10))
    add("--hours H", "as many tokens as can be sampled and trained on in H hours", number)
    add("--slots N", "texts sampled side by side; CPU: up to 64 [64; as many as a GPU's memory holds]", at_most(10**5))
    add("--epochs N", "passes over the sampled text", at_most(10**4), default=3)
    add("--batch-tokens N", "answer tokens per step", positive, default=4096)
    add("--learning-rate LR", "at its highest [by the model's width; 0.005 for 576]", number)
    add("--seed S", "same seed, same head [0]", whole, default=0)
    add("--judged-by FILE", "prompts to keep out of the text [the development prompts]", named)
    add("--work FOLDER", "sampled text, checkpoints and log [beside --out]", named)
    add("--text FOLDER", "sampled text that several runs share [the --work folder]", named)
    add("--resume", "go on with what the work folder holds")
    add = group(parser, "model and machine")
    add("-m --model NAME", "as for generating", named, default="smollm2-135m")
    add("--device", "auto, cpu, cuda or cuda:N", default="auto")
    add("--dtype", "of the frozen model and of matrix products", default="auto")
    add("--threads N", "CPU threads [as many as torch chooses]", whole)


def learn_options(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=named, help="of --learn")
    one = parser.add_mutually_exclusive_group()
    option(one, "--status", "what is kept, and what it has brought")
    option(one, "--back", "use the head before, also in a server that runs")
    option(one, "--forget", "delete all that was kept and learned")
    option(one, "--background PID", SUPPRESS, whole)  # of whom it ends with
    option(parser, "--yes", "do not ask before all is deleted")
    option(parser, "--threads N", "CPU threads [all cores]", whole)


def _keep_option(parser: ArgumentParser) -> None:
    what = "keep ids of prompts and answers there, and learn a better exit head from them while idle [keep nothing]"
    group(parser, "learning")("--learn FOLDER", what, named)


def info_options(parser: ArgumentParser) -> None:
    option(parser, "--json", "print it as one JSON object")
    model_options(parser)


def cache_options(parser: ArgumentParser) -> None:
    kinds = (ALL, MODELS, *FILES)
    option(parser, "--clean KIND", f"remove {', '.join(kinds)} [{ALL}]", nargs="?", const=ALL, choices=kinds)
    option(parser, "--yes", "do not ask")
