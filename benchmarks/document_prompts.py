"""Prompts about real texts, for `ppsd-run distill --prompts`, from free packages that their own clients fetch.

    python benchmarks/document_prompts.py --raw raw/ --judged-by judged.jsonl --out prompts.jsonl

document_sources.json lists the packages with their licences; neither they nor the prompts are part of this repository.
The families are those of `documents` in ppsd_rt/data/starters.json, whose requests they share; questions are whole.
"""

import argparse
import ast
import gzip
import html
import json
import random
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppsd_rt.bench.cli.prompt_files import read_prompts

SOURCES = Path(__file__).with_name("document_sources.json")
STARTERS = Path(__file__).parents[1] / "ppsd_rt" / "data" / "starters.json"
RUN = 8  # so many words in a row of a judged prompt make a prompt one like it
SHORT, LONG = (30, 110), (80, 320)  # words of a passage beside others, and of one alone
QUESTIONS = (
    "What is this about?",
    "What is said about {}?",
    "Who or what is {}?",
    "Why is {} mentioned?",
    "What do we learn about {}?",
    "Which facts about {} are given? Name them in a list.",
    "Is {} described as good or bad? Explain briefly.",
    "When and where does this take place?",
    "Which numbers and dates are mentioned?",
)
TURNS = (
    "Can you say more about that?",
    "Put that in simpler words.",
    "Why is that?",
    "Turn your answer into a list.",
    "Summarise that in five words.",
    "What would a critic say?",
    "Make three quiz questions from it.",
    "Explain the most difficult word in your answer.",
)
CODE = ("Complete this function.\n\n```python\n{}\n```", "What does this code do?\n\n```python\n{}\n```")


@dataclass(frozen=True)
class Passage:
    title: str
    text: str

    @property
    def words(self) -> int:
        return len(self.text.split())

    @property
    def name(self) -> str:
        """A proper name of it, else its title."""
        names = re.findall(r"(?<=[a-z,] )[A-Z]\w{3,}(?: [A-Z]\w+)*", self.text)
        return str(names[0]) if names else self.title or "the writer"


def fetch(source: dict[str, str], folder: Path) -> Path:
    """The unpacked package, in a folder of its own, where it stays."""
    place = folder / f"{source['client']}-{source['package'].replace('/', '-')}"
    if place.exists():
        return place
    name, version = source["package"], source.get("version")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        commands = {
            "apt": ["apt-get", "download", name],
            "npm": ["npm", "pack", f"{name}@{version}"],
            "pip": ["python", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", f"{name}=={version}"],
        }
        subprocess.run(commands[source["client"]], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(scratch).iterdir()
        unpacked = Path(scratch) / "unpacked"
        if file.suffix == ".deb":
            subprocess.run(["dpkg-deb", "-x", file, unpacked], check=True)
        elif file.suffix == ".whl":
            with zipfile.ZipFile(file) as archive:
                archive.extractall(unpacked)
        else:
            with tarfile.open(file) as archive:
                archive.extractall(unpacked, filter="data")
        unpacked.rename(place)
    return place


def clean(text: str) -> str:
    text = html.unescape(re.sub(r"<[^>]+>|[{}]", " ", text))
    return re.sub(r"\s+([,.;:!?)])", r"\1", re.sub(r"\s+", " ", text)).strip()


def paragraphs(path: Path) -> tuple[str, list[str]]:
    """The title and the prose of a file of any of the kinds."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix in (".dz", ".gz") else path.read_bytes()
    text = raw.decode("utf-8", "replace")
    if path.suffix in (".html", ".page"):
        title = re.search(r"<title[^>]*>(.*?)</title>", text, re.DOTALL)
        found = re.findall(r"<p\b[^>]*>(.*?)</p>|<div class=\"para\">(.*?)</div>", text, re.DOTALL)
        return clean(title[1]) if title else "", [clean(one or other) for one, other in found]
    if path.suffix == ".json":
        try:
            return path.stem, [clean(part) for value in strings(json.loads(text)) for part in value.split("\n\n")]
        except ValueError:
            return "", []
    return "", [clean(part) for part in re.split(r"\n%\n|\n\s*\n|\n(?=\S)", text)]


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


def is_prose(text: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in text)
    return len(text.split()) >= 6 and letters > 0.9 * len(text) and text[-1] in '.!?"”»' and "http" not in text


def passages(path: Path, least: int, most: int) -> Iterator[Passage]:
    """Paragraphs in a row, of `least` to `most` words; what is longer is cut after a sentence."""
    title, found = paragraphs(path)
    sentences = [s for text in found if is_prose(text) for s in re.split(r"(?<=[.!?]) (?=[A-ZÄÖÜÉÀ¿¡\"“])", text)]
    held: list[str] = []
    for sentence in [*sentences, ""]:
        words = sum(len(one.split()) for one in held)
        if words >= least and (not sentence or words + len(sentence.split()) > most or words > (least + most) / 2):
            yield Passage(title, " ".join(held))
            held = []
        if len(sentence.split()) < most:
            held.append(sentence)


def functions(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and 120 < len(code := ast.get_source_segment(text, node) or "") < 1100:
            yield code


Messages = list[str]  # of the user and the model in turns


def prompts(pools: dict[str, list[Any]], requests: dict[str, list[str]], source: random.Random) -> Iterator[Messages]:
    """Of each family about as many as there is text for. pools: long, short, code, and short ones by language."""
    for passage in pools["long"]:
        yield [source.choice(requests["digest"]).replace("{}", passage.text)]
    for place, passage in enumerate(pools["short"]):
        beside = source.sample(pools["short"], min(source.randrange(4), len(pools["short"])))
        shown = source.sample(together := [passage, *beside], len(together))
        style = source.choice(
            ("{text}", "[{number}] {text}", "Document {number} ({title}): {text}", "# {title}\n{text}")
        )
        lines = [style.format(number=n, title=p.title or "Note", text=p.text) for n, p in enumerate(shown, 1)]
        question, body = source.choice(QUESTIONS).format(passage.name), "\n\n".join(lines)
        yield [f"{question}\n\n{body}" if place % 3 else f"{body}\n\nQuestion: {question}\nAnswer:"]
        yield [source.choice(requests["rewrite"]).replace("{}", passage.text)]
        if place % 4 == 0:
            yield [f"Tell me something about {passage.name}.", passage.text, source.choice(TURNS)]
        if place % 2:
            yield [source.choice(requests["from English"]).replace("{}", passage.text.partition(". ")[0] + ".")]
    for language in sorted(pools.keys() - {"long", "short", "code"}):
        for passage in pools[language]:
            request = source.choice([*requests["to English"], f"Translate this {language} text into English.\n{{}}"])
            yield [request.replace("{}", passage.text)]
    for code in pools["code"]:
        cut = source.random() < 0.3
        shown = code[: code.rfind("\n", 0, len(code) // 2)] if cut else f"```python\n{code}\n```"
        yield [
            (CODE[0] if cut else source.choice([*requests["about code"], "Explain this.\n\n{}"])).replace("{}", shown)
        ]


def collect(folder: Path, sources: list[dict[str, str]], most: int, source: random.Random) -> dict[str, list[Any]]:
    """At most so many passages of a source and kind."""
    pools: dict[str, list[Any]] = defaultdict(list)
    for one in sources:
        place, found = fetch(one, folder), defaultdict(list)
        for path in sorted(place.glob(one["files"])):
            if path.suffix == ".py":
                found["code"] += functions(path)
            elif language := one.get("language"):
                found[language] += passages(path, 6, 60)
            else:
                found["long"] += passages(path, *LONG)
                found["short"] += passages(path, *SHORT)
        for kind, some in found.items():
            pools[kind] += source.sample(some, min(most, len(some)))
        print(f"{one['package']}: " + ", ".join(f"{len(some)} {kind}" for kind, some in found.items()), flush=True)
    return pools


def runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + RUN]) for at in range(max(1, len(words) - RUN + 1))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--raw", type=Path, required=True, help="folder for the unpacked packages")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--judged-by", help="prompts that none may be like [the development prompts]")
    parser.add_argument("--sources", type=Path, default=SOURCES)
    parser.add_argument("--most", type=int, default=900, help="passages of each source and kind [900]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.raw.mkdir(parents=True, exist_ok=True)
    source = random.Random(args.seed)
    judged = {run for prompt in read_prompts(args.judged_by) for run in runs(prompt.prompt)}
    requests = {name: family["starters"] for name, family in json.loads(STARTERS.read_text())["documents"].items()}
    pools = collect(args.raw, json.loads(args.sources.read_text()), args.most, source)
    kept: dict[tuple[str, ...], None] = {}
    counts = Counter[str]()
    for messages in prompts(pools, requests, source):
        like = any(judged & runs(text) for text in messages)
        counts["like judged ones" if like else "written"] += 1
        if not like:
            kept[tuple(messages)] = None
    lines = [
        json.dumps({"messages": [{"role": ("user", "assistant")[n % 2], "content": t} for n, t in enumerate(m)]})
        for m in kept
    ]
    source.shuffle(lines)
    args.out.write_text("".join(f"{line}\n" for line in lines))
    print(f"{args.out}: {len(lines)} prompts; left out: {counts['like judged ones']} like judged ones")


if __name__ == "__main__":
    main()
