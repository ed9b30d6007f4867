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
pair a line, the two texts divided by a tab, in a file whose name has the languages (`newstest.de-en.tsv`). A file that
begins with a brace, or is called .jsonl or .json, is JSON throughout; any other has a text on every line.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from ...cli.common import NamedPrompt, given_text, is_message, standard_input
from ...cli.notes import note
from ...errors import UsageError
from ...models.files import one_line, parse_json
from ...printable import quoted

_LANGUAGES = {
    "cs": "Czech", "de": "German", "en": "English", "es": "Spanish", "et": "Estonian",
    "fi": "Finnish", "fr": "French", "gu": "Gujarati", "hi": "Hindi", "it": "Italian",
    "ja": "Japanese", "kk": "Kazakh", "lt": "Lithuanian", "lv": "Latvian", "pl": "Polish",
    "ro": "Romanian", "ru": "Russian", "tr": "Turkish", "uk": "Ukrainian", "zh": "Chinese"
}  # fmt: skip
_SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
_PAIR = re.compile(r"(?<![a-z])([a-z]{2})-([a-z]{2})(?![a-z])")
_NEEDS = (
    'needs an object with "prompt" (a text) or "messages" (role and content each, a user\'s among them; or ShareGPT\'s '
    '"conversations", from and value each) and, if wanted, "id" (a text or an integer), or the fields of HumanEval, '
    "GSM8K, MT-Bench, XSum, CNN/DailyMail or WMT"
)


def _prompt(fields: dict[str, Any], number: int, line: int) -> NamedPrompt | None:  # noqa: PLR0911 (a format each)
    """The prompt of a line's object, or a row of CSV. number: its own in the file, line: where it stands; from 1."""

    def numbered(family: str, text: str, id: str = "id", more: str = "") -> NamedPrompt:
        """The prompt with the file's own id, or its number."""
        own = fields.get(id)
        known = isinstance(own, str | int) and not isinstance(own, bool) and own != ""
        return NamedPrompt(f"{family}-{own if known else number}", text, family + more)

    id, family = fields.get("id", line), str(fields.get("family", ""))
    ours = isinstance(id, str | int) and not isinstance(id, bool)
    ours = ours and ("id" in fields or not isinstance(fields.get("task_id"), str))
    match fields:
        case {"prompt": str(text)} if ours:
            return NamedPrompt(id, text, family)
        case _ if ours and (asked := _asked(_turns(fields))):
            return NamedPrompt(id, asked[-1]["content"], family, asked)
        case {"task_id": str(task), "prompt": str(text)}:
            return NamedPrompt(task, text, "humaneval")
        case {"question": str(text)}:
            return numbered("gsm8k", text)
        case {"turns": [str(first), *_], "category": str(category)}:
            return numbered("mt-bench", first, "question_id", f"/{category}")
        case {"document": str(text)}:
            return numbered("xsum", f"Summarize: {text}")
        case {"article": str(text)}:
            return numbered("cnn-dm", f"Summarize: {text}")
        case {"translation": {**pair}} if len(pair) == 2 and all(isinstance(text, str) for text in pair.values()):
            source, target = (_LANGUAGES.get(str(language), language) for language in pair)
            return numbered("wmt", f"Translate {source} to {target}: {next(iter(pair.values()))}")
    return None


def _turns(fields: dict[str, Any]) -> list[Any]:
    """The turns of a conversation, under whichever of its names."""
    return next(
        (fields[key] for key in ("messages", "conversations", "prompt") if isinstance(fields.get(key), list)), []
    )


def _asked(turns: list[Any]) -> tuple[dict[str, Any], ...]:
    """The messages of a conversation up to what is to be answered: data for training ends with the answer to learn.

    Turns are as OpenAI writes them, or as ShareGPT does. None where one is neither, or nothing is asked.
    """
    messages = [
        {"role": _SHAREGPT.get(turn["from"], turn["from"]), "content": turn["value"]}
        if isinstance(turn, dict) and isinstance(turn.get("from"), str) and "value" in turn
        else turn
        for turn in turns
    ]
    if not all(map(is_message, messages)):
        return ()
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return tuple(messages)


def read_prompts(path: str | None) -> list[NamedPrompt]:
    """The prompts of a file in any format above; `-`: standard input; None: the development prompts of the package."""
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
    families, chosen = Counter[str](), []
    for prompt in prompts:
        families[prompt.family] += 1
        if families[prompt.family] <= limit:
            chosen.append(prompt)
    return chosen


def prompts_of(text: str, path: str) -> list[NamedPrompt]:
    """The prompts of a file with this text. UsageError: what is wrong with it, and where."""
    prompts: dict[str | int, NamedPrompt] = {}
    answered = 0
    for number, (line, fields) in enumerate(_items(text, path), 1):
        prompt = _prompt(fields, number, line) if isinstance(fields, dict) else None
        if prompt is None:
            raise UsageError(f"{path}, line {line}: {_NEEDS}")
        if prompt.id in prompts:
            raise UsageError(f"{path}, line {line}: the id {quoted(prompt.id)} stands for an earlier prompt already")
        prompts[prompt.id] = prompt
        answered += bool(prompt.messages) and len(prompt.messages) < len(_turns(fields))
    if not prompts:
        raise UsageError(f"{path} holds no prompts")
    if answered:
        note(f"{path}: {answered} of {len(prompts)} end with an answer of the assistant, which is left out")
    return list(prompts.values())


def _items(text: str, path: str) -> Iterator[tuple[int, Any]]:
    """Every object, row of CSV or pair of texts, with the number of its line."""
    # Not splitlines: texts may hold other ends of lines.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    first = lines[0][1].strip() if lines else ""
    if {"document", "article"} & set(re.split('[,"]+', first)) and not first.startswith("{"):
        yield from _rows(text, path)
        return
    objects = first.startswith("{") or PurePath(path).suffix.lower() in (".json", ".jsonl")
    pairs = first.count("\t") == 1 and not objects
    languages = _PAIR.findall(PurePath(path).name.lower())
    if pairs and not languages:
        raise UsageError(f"{path} has pairs of texts, but no languages in its name, such as de-en")
    for number, line in lines:
        if objects:
            try:
                yield number, parse_json(line)
            except ValueError as error:
                problem = f"not JSON, one object a line ({one_line(error)})"
                raise UsageError(f"{path}, line {number}: {problem}") from None
        elif pairs:
            texts = line.removesuffix("\r").split("\t")
            if len(texts) != 2:
                raise UsageError(f"{path}, line {number}: needs two texts with a tab between them")
            yield number, {"translation": dict(zip(languages[0], texts, strict=True))}
        elif _is_object(line):
            raise UsageError(f"{path}, line {number}: JSON among texts; make all lines texts, or all JSON")
        else:
            yield number, {"prompt": line.strip()}


def _is_object(line: str) -> bool:
    try:
        return line.lstrip().startswith("{") and isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _rows(text: str, path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)  # a quoted text may go on over several lines
    most = csv.field_size_limit(len(text) + 1)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: not CSV ({one_line(error)})") from None
    finally:
        csv.field_size_limit(most)
