"""Options of `ppsd-run cache`, and what lies in the cache folder."""

import argparse

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
    parser.add_argument(
        "--clean", nargs="?", const=ALL, choices=kinds, metavar="KIND", help=f"remove {', '.join(kinds)} [{ALL}]"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask before models are removed")
