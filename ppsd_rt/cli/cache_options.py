"""Options of `ppsd-run cache`, and what lies in the cache folder."""

import argparse

from .values import option

ALL = "all"
MODELS = "models"
FILES = {  # kind: its subfolder, and what our files in it are called
    "calibration": ("calibration", ("*.json", "tmp*")),
    "importance": ("importance", ("*.npy", "tmp*")),
    "campaigns": ("check", ("seed-*.jsonl",)),
    "chat": ("chat", ("history.json", "tmp*")),
    "benchmarks": ("benchmarks", ("*.gguf", "*/*.json", "*/*.safetensors")),
}


def cache_options(parser: argparse.ArgumentParser) -> None:
    kinds = (ALL, MODELS, *FILES)
    option(parser, "--clean KIND", f"remove {', '.join(kinds)} [{ALL}]", nargs="?", const=ALL, choices=kinds)
    option(parser, "--yes", "do not ask before models are removed")
