"""Files of prompts: ours, and those of public benchmarks, told apart by the names of their fields.

| benchmark | fields | prompt | family |
| --- | --- | --- | --- |
| HumanEval (Chen et al. 2021) | task_id, prompt | as it is | humaneval |
| GSM8K (Cobbe et al. 2021) | question, answer | the question | gsm8k |
| MT-Bench (Zheng et al. 2023) | question_id, category, turns | the first turn | mt-bench/CATEGORY |
| XSum (Narayan et al. 2018) | document, summary | "Summarize: " and the document | xsum |
| CNN/DailyMail (See et al. 2017) | article, highlights | "Summarize: " and the article | cnn-dm |
| WMT (statmt.org) | translation, {language: text, language: text} | "Translate A to B: " and the first text | wmt |

They are JSON, one object a line. XSum and CNN/DailyMail may also be CSV with these names in the first line, and WMT one
pair a line, the two texts divided by a tab, in a file whose name has the languages (`newstest.de-en.tsv`). Any other
file that begins with no brace has a prompt on every line.
"""

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from ...cli.common import given_text, standard_input
from ...cli.prompts import NamedPrompt, is_message
from ...errors import UsageError
from ...models.files import one_line, parse_json
from ...printable import quoted

_LANGUAGES = {
    "cs": "Czech",
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "et": "Estonian",
    "fi": "Finnish",
    "fr": "French",
    "gu": "Gujarati",
    "hi": "Hindi",
    "it": "Italian",
    "ja": "Japanese",
    "kk": "Kazakh",
    "lt": "Lithuanian",
    "lv": "Latvian",
    "pl": "Polish",
    "ro": "Romanian",
    "ru": "Russian",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "zh": "Chinese",
}
_PAIR = re.compile(r"(?<![a-z])([a-z]{2})-([a-z]{2})(?![a-z])")
_NEEDS = (
    'needs an object with "prompt" (a text) or "messages" (role and content each) and, if wanted, "id" (a text or an '
    "integer), or the fields of HumanEval, GSM8K, MT-Bench, XSum, CNN/DailyMail or WMT"
)


@dataclass(frozen=True)
class _Item:
    """A line's object, or a row of CSV."""

    fields: dict[str, Any]
    number: int  # of the object in the file, from 1
    line: int = 0  # from 1

    def text(self, name: str) -> str | None:
        value = self.fields.get(name)
        return value if isinstance(value, str) else None

    def id(self, name: str, family: str) -> str:
        """The file's own, or the object's number."""
        value = self.fields.get(name)
        known = isinstance(value, str | int) and not isinstance(value, bool) and value != ""
        return f"{family}-{value if known else self.number}"


def _ours(item: _Item) -> NamedPrompt | None:
    id, family = item.fields.get("id", item.line), str(item.fields.get("family", ""))
    if not isinstance(id, str | int) or isinstance(id, bool) or ("id" not in item.fields and item.text("task_id")):
        return None
    if (prompt := item.text("prompt")) is not None:
        return NamedPrompt(id, prompt, family)
    messages = item.fields.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
        return None
    return NamedPrompt(id, messages[-1]["content"], family, tuple(messages))


def _humaneval(item: _Item) -> NamedPrompt | None:
    id, prompt = item.text("task_id"), item.text("prompt")
    return None if id is None or prompt is None else NamedPrompt(id, prompt, "humaneval")


def _gsm8k(item: _Item) -> NamedPrompt | None:
    question = item.text("question")
    return None if question is None else NamedPrompt(item.id("id", "gsm8k"), question, "gsm8k")


def _mt_bench(item: _Item) -> NamedPrompt | None:
    turns, category = item.fields.get("turns"), item.text("category")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or category is None:
        return None
    return NamedPrompt(item.id("question_id", "mt-bench"), turns[0], f"mt-bench/{category}")


def _xsum(item: _Item) -> NamedPrompt | None:
    text = item.text("document")
    return None if text is None else NamedPrompt(item.id("id", "xsum"), f"Summarize: {text}", "xsum")


def _cnn_dm(item: _Item) -> NamedPrompt | None:
    text = item.text("article")
    return None if text is None else NamedPrompt(item.id("id", "cnn-dm"), f"Summarize: {text}", "cnn-dm")


def _wmt(item: _Item) -> NamedPrompt | None:
    pair = item.fields.get("translation")
    if not isinstance(pair, dict) or len(pair) != 2 or not all(isinstance(text, str) for text in pair.values()):
        return None
    source, target = pair
    names = [_LANGUAGES.get(language, language) for language in (source, target)]
    return NamedPrompt(item.id("id", "wmt"), f"Translate {names[0]} to {names[1]}: {pair[source]}", "wmt")


_FORMATS: tuple[Callable[[_Item], NamedPrompt | None], ...] = (
    _ours,
    _humaneval,
    _gsm8k,
    _mt_bench,
    _xsum,
    _cnn_dm,
    _wmt,
)


def read_prompts(path: str | None) -> list[NamedPrompt]:
    """Of a file in any of the formats above; `-`: standard input; None: the development prompts of the package."""
    if path is None:
        text = (files("ppsd_rt") / "data" / "prompts.jsonl").read_text(encoding="utf-8")
    elif path == "-":
        return prompts_of(standard_input(), "standard input")
    else:
        text = given_text(path)
    return prompts_of(text, str(path))


def first_of_each_family(prompts: list[NamedPrompt], limit: int | None) -> list[NamedPrompt]:
    if limit is None:
        return prompts
    families: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        families[prompt.family] = families.get(prompt.family, 0) + 1
        if families[prompt.family] <= limit:
            chosen.append(prompt)
    return chosen


def prompts_of(text: str, path: str) -> list[NamedPrompt]:
    """The prompts of a file with this text. UsageError: what is wrong with it, and where."""
    prompts: dict[str | int, NamedPrompt] = {}
    for where, item in _items(text, path):
        prompt = next(filter(None, (read(item) for read in _FORMATS)), None)
        if prompt is None:
            raise UsageError(f"{where}: {_NEEDS}")
        if prompt.id in prompts:
            raise UsageError(f"{where}: the id {quoted(prompt.id)} stands for an earlier prompt already")
        prompts[prompt.id] = prompt
    if not prompts:
        raise UsageError(f"{path} holds no prompts")
    return list(prompts.values())


def _items(text: str, path: str) -> Iterator[tuple[str, _Item]]:
    """(where, what) of every object, row of CSV or pair of texts."""
    # Not splitlines: texts may hold other ends of lines.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    first = lines[0][1].strip() if lines else ""
    if first.startswith("{"):
        yield from _objects(lines, path)
    elif {"document", "article"} & set(re.split('[,"]+', first)):
        yield from _rows(text, path)
    elif first.count("\t") == 1:
        yield from _pairs(lines, path)
    else:
        for place, (number, line) in enumerate(lines, 1):
            yield f"{path}, line {number}", _Item({"prompt": line.strip()}, place, number)


def _objects(lines: list[tuple[int, str]], path: str) -> Iterator[tuple[str, _Item]]:
    for place, (number, line) in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            item = parse_json(line)
        except ValueError as error:
            raise UsageError(f"{where}: not JSON ({one_line(error)})") from None
        if not isinstance(item, dict):
            raise UsageError(f"{where}: {_NEEDS}")
        yield where, _Item(item, place, number)


def _rows(text: str, path: str) -> Iterator[tuple[str, _Item]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)  # a quoted text may go on over several lines
    most = csv.field_size_limit(len(text) + 1)
    try:
        for place, row in enumerate(reader, 1):
            yield f"{path}, line {reader.line_num}", _Item(row, place)
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: not CSV ({one_line(error)})") from None
    finally:
        csv.field_size_limit(most)


def _pairs(lines: list[tuple[int, str]], path: str) -> Iterator[tuple[str, _Item]]:
    languages = _PAIR.findall(PurePath(path).name.lower())
    if not languages:
        raise UsageError(f"{path} has pairs of texts, but no languages in its name, such as de-en")
    for place, (number, line) in enumerate(lines, 1):
        texts = line.removesuffix("\r").split("\t")
        if len(texts) != 2:
            raise UsageError(f"{path}, line {number}: needs two texts with a tab between them")
        yield f"{path}, line {number}", _Item({"translation": dict(zip(languages[0], texts, strict=True))}, place)
