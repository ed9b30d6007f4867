"""The documentation shows commands that exist, and names files that are there."""

import re
import shlex
from pathlib import Path

import pytest

from ppsd_rt.cli.parser import parse

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|h|cpp|md|jsonl))`")
LINK = re.compile(r"\]\(((?!https?:)[^)#]+)\)")
COMMENTED = re.compile(r"//.*?((?:[\w-]+/)+\w+\.(?:py|pyi|md))\b")


def commands(page):
    for block in FENCE.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == "ppsd-run":
                yield words[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page):
    for words in commands(page):
        parse(words)


def test_there_are_commands_to_parse():
    assert sum(1 for page in PAGES for _ in commands(page)) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_links_exist(page):
    text = page.read_text(encoding="utf-8")
    assert [name for name in FILE.findall(text) if not (ROOT / name).exists()] == []
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []


def test_files_that_the_sources_name_exist():
    for path in (ROOT / "csrc").rglob("*.*"):
        for name in COMMENTED.findall(path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path.name} names {name}"
