"""benchmarks/document_prompts.py, on packages that are there already: nothing is fetched."""

import importlib
import json
import sys
from pathlib import Path

import pytest

SENTENCES = " ".join(
    f"The town of Ashford had {n} mills and sold its flour to Marlow in those years." for n in range(60)
)
GERMAN = " ".join(f"Die Stadt hatte {n} Tore, und an jedem stand ein Wagen mit alten Fahnen." for n in range(9))


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("document_prompts")


def test_texts_become_prompts(module, tmp_path, monkeypatch, capsys):
    raw = tmp_path / "raw" / "apt-made-up"
    raw.mkdir(parents=True)
    (raw / "town.html").write_text(f"<title>Ashford</title><p class='a'>{SENTENCES}</p><p>x = 1;;;</p>")
    (raw / "tore.u8").write_text(GERMAN)
    (raw / "code.py").write_text("def half(x):\n" + "    x = x // 2  # and again\n" * 8 + "    return x\n")
    sources = [{"client": "apt", "package": "made-up", "files": f"*.{kind}"} for kind in ("html", "u8", "py")]
    sources[1]["language"] = "German"
    (tmp_path / "sources.json").write_text(json.dumps(sources))
    (tmp_path / "judged.txt").write_text("The town of Ashford had 3 mills and sold its flour\n")
    out = tmp_path / "out.jsonl"
    options = ["--raw", raw.parent, "--sources", tmp_path / "sources.json", "--judged-by", tmp_path / "judged.txt"]
    monkeypatch.setattr(sys, "argv", ["document_prompts.py", *map(str, options), "--out", str(out)])
    module.main()
    conversations = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert f"{out}: {len(conversations)} prompts; left out: " in capsys.readouterr().out
    texts = [messages[0]["content"] for messages in conversations]
    assert "had 30 mills" in "".join(texts) and "had 3 mills" not in "".join(texts), "a judged prompt is kept out"
    assert any("Tore" in text and "English" in text for text in texts)
    assert any("def half" in text for text in texts)
    assert any("Question:" in text and "Ashford" in text for text in texts)
    turns = [[message["role"] for message in messages] for messages in conversations]
    assert ["user", "assistant", "user"] in turns and ["user"] in turns
    assert not any("{}" in text or "x = 1;;;" in text for text in texts)
    module.main()
    assert [json.loads(line)["messages"] for line in out.read_text().splitlines()] == conversations


def test_passages_are_whole_sentences_of_a_length(module, tmp_path):
    (tmp_path / "a.html").write_text(f"<p>{SENTENCES}</p>")
    found = list(module.passages(tmp_path / "a.html", 40, 90))
    assert len(found) > 5
    assert all(40 <= passage.words <= 90 and passage.text.endswith(".") for passage in found)
    assert all(passage.text.startswith("The town") for passage in found)
