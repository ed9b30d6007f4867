"""Files of prompts in the formats of public benchmarks, here with made-up contents."""

import json

import pytest

from ppsd_rt.bench.cli.prompt_files import read_prompts
from ppsd_rt.errors import UsageError

HUMANEVAL = {
    "task_id": "HumanEval/7",
    "prompt": 'def twice(x):\n    """Twice x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "twice",
}
GSM8K = {"question": "Ann has 3 apples and buys 4. How many has she?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Now without the letter e."]}
XSUM = {"document": "A bridge has opened.\nIt is long.", "summary": "Bridge opens.", "id": "29750031"}
CNN_DM = {"article": "(CNN) A dog came home.", "highlights": "Dog home.", "id": "abc"}
WMT = {"translation": {"de": "Guten Morgen.", "en": "Good morning."}}

FORMATS = {
    "humaneval": (HUMANEVAL, "HumanEval/7", HUMANEVAL["prompt"], "humaneval"),
    "gsm8k": (GSM8K, "gsm8k-1", GSM8K["question"], "gsm8k"),
    "mt-bench": (MT_BENCH, "mt-bench-81", "Write a poem.", "mt-bench/writing"),
    "xsum": (XSUM, "xsum-29750031", "Summarize: A bridge has opened.\nIt is long.", "xsum"),
    "cnn-dm": (CNN_DM, "cnn-dm-abc", "Summarize: (CNN) A dog came home.", "cnn-dm"),
    "wmt": (WMT, "wmt-1", "Translate German to English: Guten Morgen.", "wmt"),
}


@pytest.fixture
def read(tmp_path):
    def read(content, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8", newline="")
        return [(prompt.id, prompt.prompt, prompt.family) for prompt in read_prompts(str(path))]

    return read


@pytest.mark.parametrize("format", FORMATS)
def test_lines_of_json(read, format):
    item, *wanted = FORMATS[format]
    assert read(json.dumps(item) + "\n") == [tuple(wanted)]


def test_objects_without_an_id_are_numbered_and_formats_may_be_mixed(read):
    own = {"id": "mine", "prompt": "Hello", "family": "chat"}
    found = read("\n\n".join(map(json.dumps, [GSM8K, own, GSM8K, WMT])))
    assert [(id, family) for id, _, family in found] == [
        ("gsm8k-1", "gsm8k"),
        ("mine", "chat"),
        ("gsm8k-3", "gsm8k"),
        ("wmt-4", "wmt"),
    ]


def test_ids_stay_as_they_are_and_the_line_stands_for_a_missing_one(read):
    found = read('{"id": 7, "prompt": "a"}\n\n{"prompt": "b"}\n{"id": "7", "prompt": "c"}\n')
    assert found == [(7, "a", ""), (3, "b", ""), ("7", "c", "")]


def test_lines_of_plain_text(read):
    """Also where a line looks a little like a table's header."""
    assert read('Why?\n\nAn article, a "document".\n', "a.txt") == [
        (1, "Why?", ""),
        (3, 'An article, a "document".', ""),
    ]


def test_conversations(tmp_path):
    path = tmp_path / "talk.jsonl"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    path.write_text(json.dumps({"id": "a", "messages": messages}))
    (prompt,) = read_prompts(str(path))
    assert (prompt.id, prompt.prompt, prompt.messages) == ("a", "hi", tuple(messages))


def test_articles_as_csv(read):
    """Quoted texts have commas, quotes and ends of lines; a text may be longer than csv's own limit."""
    long = "word " * 40_000
    content = f'id,article,highlights\r\nx1,"He said ""no"",\nand left.",He left.\r\nx2,{long},Words.\r\n'
    assert read(content, "test.csv") == [
        ("cnn-dm-x1", 'Summarize: He said "no",\nand left.', "cnn-dm"),
        ("cnn-dm-x2", f"Summarize: {long}", "cnn-dm"),
    ]
    assert read("document,summary\nA bridge.,Bridge.\n") == [("xsum-1", "Summarize: A bridge.", "xsum")]


def test_pairs_of_texts(read):
    found = read("Guten Morgen.\tGood morning.\r\nJa.\tYes.\r\n", "newstest2014.de-en.tsv")
    assert found == [
        ("wmt-1", "Translate German to English: Guten Morgen.", "wmt"),
        ("wmt-2", "Translate German to English: Ja.", "wmt"),
    ]
    assert read("Eya.\tYes.\n", "wmt.xx-en.tsv")[0][1] == "Translate xx to English: Eya."


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        ('{"text": "hello"}', "a.jsonl", 'line 1: needs an object with "prompt" (a text) or "messages"'),
        ('{"id": true, "prompt": "x"}', "a.jsonl", "line 1: needs an object"),
        ('{"prompt": "x"}\nWhy?\n', "a.jsonl", "line 2: not JSON"),
        ('{"prompt": "x"}\nWhy?\n', "a.txt", "line 2: not JSON"),
        ('Why?\n{"prompt": "x"}\n', "a.jsonl", "line 1: not JSON"),
        ('Why?\n{"prompt": "x"}\n', "a.txt", "line 2: JSON among texts"),
        ('[{"prompt": "a"}]', "a.json", "line 1: needs an object"),
        ('{"turns": [], "category": "writing"}', "a.jsonl", "line 1: needs an object"),
        ('id,article\nx,"never ends', "a.csv", "not CSV (unexpected end of data)"),
        ("id,article\n", "a.csv", "holds no prompts"),
        ("id,article\nx,a\nx,b\n", "a.csv", "line 3: the id 'cnn-dm-x' stands for an earlier prompt"),
        ("Ja.\tYes.\n", "pairs.tsv", "no languages in its name, such as de-en"),
        ("Ja.\tYes.\nNein.\n", "wmt.de-en.tsv", "line 2: needs two texts with a tab between them"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(read, content, name, words):
    with pytest.raises(UsageError) as error:
        read(content, name)
    assert words in str(error.value)
    assert name in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("form", ["messages", "conversations", "prompt"])
def test_conversations_that_end_with_the_answer_to_learn(tmp_path, form, caplog):
    """Data for fine-tuning: the last turns of the assistant are not part of what is asked."""
    turns = [("system", "be brief"), ("user", "hi"), ("assistant", "hello"), ("user", "2+2?"), ("assistant", "4")]
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    own = [{"role": role, "content": text} for role, text in turns]
    written = [{"from": names[role], "value": text} for role, text in turns] if form == "conversations" else own
    lines = [{"id": "a", form: written}, {"id": "b", form: written[:2]}, {"id": "c", form: [*written[:3], written[2]]}]
    path = tmp_path / "sft.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with caplog.at_level("INFO", "ppsd_rt"):
        prompts = read_prompts(str(path))
    assert [prompt.messages for prompt in prompts] == [tuple(own[:4]), tuple(own[:2]), tuple(own[:2])]
    assert [prompt.prompt for prompt in prompts] == ["2+2?", "hi", "hi"]
    assert f"{path}: 2 of 3 end with an answer of the assistant, which is left out" in caplog.text


def test_conversation_in_which_nothing_is_asked(tmp_path):
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "4"}]}))
    with pytest.raises(UsageError, match="line 1: needs an object .* a user's among them"):
        read_prompts(str(path))
