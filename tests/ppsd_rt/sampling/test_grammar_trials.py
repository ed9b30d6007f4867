"""Grammars that would take the machine: each hits a limit, and takes nothing else with it."""

import os
import select
import subprocess
import sys
import threading

import pytest
from llguidance import LLMatcher
from support import EOS, VOCAB, byte_tokenizer

from ppsd_rt import Grammar, UsageError
from ppsd_rt.models.tokenizer import load_tokenizer
from ppsd_rt.sampling import grammar as grammar_module
from ppsd_rt.sampling.grammar import Grammars
from ppsd_rt.sampling.grammar_trials import GrammarTrials

HANG = 120  # seconds: a guard, no test waits for it to pass
PRIMES = Grammar.lark("start: A\nA: " + " & ".join(f"/(a{{{prime}}})*/" for prime in (2, 3, 5, 7, 11, 13, 17, 19)))
MULTIPLE = Grammar.json_schema({"type": "integer", "multipleOf": 999983})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grammars")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, VOCAB, [EOS])


@pytest.mark.parametrize("hopeless", [PRIMES, MULTIPLE], ids=["primes", "multipleOf"])
def test_a_grammar_that_takes_too_long(grammars, hopeless, monkeypatch):
    monkeypatch.setattr(grammars._trials, "_seconds", 0.4)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"compiling it takes more than 0.4 s of processor time"):
            grammars.masks(hopeless)
        monkeypatch.setattr(grammars._trials, "run", None)  # the second time it is known


def test_a_grammar_that_takes_too_much_memory(tokenizer):
    vocabulary = [tokenizer.token_bytes(id) for id in range(VOCAB)], [EOS], None, [EOS], VOCAB
    trials = GrammarTrials(vocabulary, memory=16 << 20)
    wrong, *_ = trials.run(MULTIPLE.kind, MULTIPLE.text)
    assert wrong == "compiling it takes more than 16 MiB of memory, or it nests too deep"
    assert trials.run("regex", "a+")[0] is None, "the next one has a process of its own"


NESTED = '{"items":' * 5000 + "{}" + "}" * 5000


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar.json_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "allows no answer at all"),
        (Grammar.lark("start: a\na: a"), "allows no answer at all"),
        (Grammar.json_schema(NESTED), "nests too deep"),
        (Grammar.regex("(" * 20000 + "a" + ")" * 20000), "."),
        (Grammar.regex("a" * (1 << 20) + "b"), "1048577 characters, and 1048576 are the most"),
    ],
    ids=lambda value: "" if isinstance(value, str) else f"{value.kind} {value.text[:30]}",
)
def test_grammars_that_say_nothing_or_cannot_be(grammars, grammar, said):
    with pytest.raises(UsageError, match=f"the {grammar.kind} is not valid: .*({said})") as caught:
        grammars.masks(grammar)
    assert "\n" not in str(caught.value)


def test_others_go_on_meanwhile(grammars, monkeypatch):
    monkeypatch.setattr(grammars._trials, "_seconds", 1000.0)
    monkeypatch.setattr(grammars._trials, "_idle", [grammars._trials._start()])
    process, ended = grammars._trials._idle[0], []
    asked = threading.Thread(target=lambda: ended.append(grammars._trials.run("lark", PRIMES.text + " ")[0]))
    asked.start()
    while grammars._trials._idle:
        asked.join(0.01)
    assert grammars.masks(Grammar.regex("other one")), "in a process of its own, meanwhile"
    assert asked.is_alive()
    process.kill()
    asked.join(HANG)
    assert ended == ["compiling it takes more than 256 MiB of memory, or it nests too deep"]


def test_rules_that_nest_too_deep_end_their_trial_alone(grammars):
    """On a stack of the usual size they would end the server."""
    rules = [f"a{n}: a{n + 1}" for n in range(50_000)]
    with pytest.raises(UsageError, match="or it nests too deep"):
        grammars.masks(Grammar.lark("\n".join(["start: a0", *rules, 'a50000: "a"'])))


def test_compiled_grammars_are_kept_within_bounds(grammars, monkeypatch):
    tried, made = [], LLMatcher.grammar_from_regex
    monkeypatch.setattr(grammars._trials, "run", lambda kind, text: (tried.append(text), (None, 0, made(text), ()))[1])
    monkeypatch.setattr(grammar_module, "_MOST_SEEN", 2)
    for pattern in ("k1", "k2", "k1", "k3", "k1", "k2"):
        grammars.masks(Grammar.regex(pattern))
    assert tried == ["k1", "k2", "k3", "k2"]
    assert len(grammars._seen) == 2
    monkeypatch.setattr(grammars._trials, "run", lambda kind, text: (None, 200 << 20, made(text), ()))
    for pattern in ("big1", "big2"):
        grammars.masks(Grammar.regex(pattern))
    assert [grammar.text for grammar in grammars._seen] == ["big2"]


def test_processes_end_with_the_one_that_started_them():
    script = """
from ppsd_rt.sampling.grammar_trials import GrammarTrials
trials = GrammarTrials(([bytes([i]) for i in range(256)] + [b"</s>"], [256], None, [256], 257))
trials.run("regex", "a+")
print(trials._idle[0].pid, flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        ends = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    assert select.select([ends], [], [], HANG)[0], "it reads the end of its input"
    os.close(ends)
