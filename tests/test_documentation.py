"""The documentation shows commands that exist, names files that are there, and its Python examples run."""

import json
import re
import shlex
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from support import write_model

from ppsd_rt import _native
from ppsd_rt.bench.cli.check import SCHEDULES
from ppsd_rt.cli.commands import COMMANDS
from ppsd_rt.cli.parser import _build, parse
from ppsd_rt.cpu.answers import MOST_ANSWERS
from ppsd_rt.models.checkpoint import read_metadata
from ppsd_rt.sampling.grammar_worker import MEMORY, SECONDS

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
API = ROOT / "docs" / "guide" / "python.md"
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md", "examples/README.md")
PAGES = sorted([*(ROOT / name for name in TOP), *(ROOT / "docs").rglob("*.md")])

FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:pyi?|h|cpp|sh|md|jsonl|svg))`")
RESULT = re.compile(r"`(?:benchmarks/results/)?(\d{4}-\d\d-\d\d-[a-z\d.-]+\.jsonl?)`")
OURS = re.compile(r"`((?:benchmarks|csrc|docs|models|ppsd_rt|tests|triton_kernels)/(?:[\w.-]+/)*)`")
COMMENTED = re.compile(r"//.*?((?:[\w-]+/)+\w+\.(?:py|pyi|md))\b")
MAKE = re.compile(r"`make ([a-z-]+)[^`]*`")
SOURCES = ("benchmarks", "csrc", "examples", "models", "ppsd_rt", "tests", "triton_kernels")
OPERATORS = "|&;<>()"
OPTION = re.compile(r"`(?:[\w. -]* )?(--[a-z][\w-]*)")
DEFAULT = re.compile(r"^\| `(?:-\w`, `)?(--[a-z][\w-]*)[^|]*\| ([\d .]+) \|", re.MULTILINE)
NAMED = re.compile(r"`_?([A-Za-z_][\w:.]*)`,? (?:of|in) `((?:[\w.-]+/)+[\w.-]+\.(?:py|h|cpp))`")
CONSTANT = re.compile(r"^\| `(\w+)`(?:, `(\w+)`)? \| ([\d.]+)(?:, (\d+))? \|", re.MULTILINE)
FOREIGN = {"--address", "--check", "--max-restarts", "--model_args", "--nproc-per-node"}  # other programs' options
GONE = {"--bandwidth", "--cluster", "--measured", "--row-bytes", "--second"}  # of which history tells
WIRE = int(re.findall(r"kWireVersion = (\d+);", (ROOT / "csrc/stages/pass.h").read_text())[0])
LIMITS = {  # what a page says: the constant that makes it true
    ("docs/design/overview.md", r"answers at once \| up to (\d+) \|"): MOST_ANSWERS,
    ("docs/guide/python.md", r"decodes up to (\d+) answers side by side"): MOST_ANSWERS,
    ("docs/design/exactness.md", r"\| schedules \| (\d+) \|"): len(SCHEDULES),
    ("docs/guide/python.md", r"more than (\d+) s of processor time"): SECONDS,
    ("docs/guide/serve.md", r"Its limits are (\d+) s of processor time"): SECONDS,
    ("docs/guide/serve.md", r"of processor time, (\d+) MiB"): MEMORY >> 20,
    ("docs/design/pipeline-protocol.md", r"`csrc/stages/pass.h`, version (\d+)"): WIRE,
    ("docs/design/kernels.md", r"A pass takes up to (\d+) rows"): _native.PASS_ROWS,
}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def simple_commands(page):
    """The words of each command of the shell blocks, cut at pipes and the like; a redirection is a piece of its own."""
    for block in SHELL.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(re.sub(r"\b\d(?=>)", "", line), posix=True, punctuation_chars=OPERATORS)
            lexer.whitespace_split = True
            words, after = [], ""
            for operator, piece in groupby(lexer, key=lambda word: set(word) <= set(OPERATORS)):
                if operator:
                    after = "".join(piece)
                elif after in ("<", ">", ">>", ">&"):
                    words += list(piece)[1:]  # the first is the file; what follows still belongs to the command
                else:
                    yield words
                    words = list(piece)
            yield words


def commands(page):
    """The arguments of ours: of `ppsd-run`, and of `-m ppsd_rt` under Python or torchrun."""
    for words in simple_commands(page):
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words and Path(words[0]).name == "ppsd-run":
            yield words[1:]
        elif ("-m", "ppsd_rt") in pairwise(words):
            yield words[words.index("ppsd_rt") + 1 :]


def anchors(page):
    """What links may name after a `#`: its headings, as GitHub spells them."""
    headings = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def make_targets():
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@every_page
def test_commands_parse(page):
    for words in commands(page):
        try:
            parse(words)
        except SystemExit as end:  # --help and --version
            assert not end.code, words


@every_page
def test_scripts_and_make_targets_exist(page):
    targets = MAKE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    for words in simple_commands(page):
        targets += [word for word in words[1:] if words[0] == "make" and "=" not in word]
        for word in words:
            name = word.partition("::")[0]
            ours = re.fullmatch(r"(?:benchmarks|csrc|examples|tests)/\S+\.(?:py|sh)", name)
            assert not ours or (ROOT / name).exists(), name
    assert set(targets) <= make_targets()


@cache
def results():
    """Names of results: files, and the lines of those files that hold the results of several days."""
    files = list((ROOT / "benchmarks/results").iterdir())
    lines = [line for file in files if "-to-" in file.name for line in file.read_text(encoding="utf-8").splitlines()]
    return {file.name for file in files} | {json.loads(line)["file"] for line in lines}


@every_page
def test_files_and_links_exist(page):
    text = page.read_text(encoding="utf-8")
    assert [name for name in FILE.findall(text) + OURS.findall(text) if not (ROOT / name).exists()] == []
    assert set(RESULT.findall(text)) - results() == set()
    for link, anchor in LINK.findall(FENCE.sub("", text)):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


@cache
def sources(*endings):
    found = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.*") if path.suffix in endings]
    found = [path for path in found if "llama.cpp" not in path.parts]  # a peer that somebody has built there
    return "".join(path.read_text(encoding="utf-8") for path in found)


@every_page
def test_options_exist(page):
    """Ours stand in quotes in some source."""
    known = set(re.findall(r"[\"'](--[a-z][\w-]*)", sources(".py"))) | FOREIGN | GONE
    assert set(OPTION.findall(page.read_text(encoding="utf-8"))) <= known


def test_tables_of_options_have_the_defaults_of_the_command():
    actions = [action for name in COMMANDS for action in _build(name)._actions]
    rows = [row for page in PAGES for row in DEFAULT.findall(page.read_text(encoding="utf-8"))]
    assert len(rows) > 15
    for option, default in rows:
        found = [action for action in actions if option in action.option_strings]
        known = [float(f.default or 0) for f in found if not isinstance(f.default, list)]
        known += [float(text) for f in found for text in re.findall(r"\[(\d+)", f.help)]  # it is said there alone
        assert float(default.replace(" ", "")) in known, option


def test_names_stand_in_the_files_that_pages_say():
    for page in PAGES:
        for name, path in NAMED.findall(page.read_text(encoding="utf-8")):
            assert re.split(r"::|\.", name)[-1] in (ROOT / path).read_text(encoding="utf-8"), f"{name} in {path}"


def test_constants_are_those_of_the_code():
    page = (ROOT / "docs/design/planner.md").read_text(encoding="utf-8")
    said = {}
    for first, second, value, other in CONSTANT.findall(page):
        said |= {first: float(value)} | ({second: float(other)} if second else {})
    header = (ROOT / "csrc/loop/policy.h").read_text(encoding="utf-8")
    tuning = header.split("struct DraftTuning")[1].split("};")[0]
    tuned = dict(re.findall(r"(?:double |int |, )(\w+) = ([\d.]+)[,;]", tuning.replace(", sure", "; double sure")))
    assert said == {name: float(value) for name, value in tuned.items()}
    for (name, words), value in LIMITS.items():
        [found] = set(re.findall(words, (ROOT / name).read_text(encoding="utf-8")))
        assert float(found) == value, name


def test_shipped_heads_are_what_their_page_says():
    page = (ROOT / "docs/guide/exit-heads.md").read_text(encoding="utf-8")
    models = "smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
    paths = [next((ROOT / "models/heads").glob(f"{model}-*.safetensors")) for model in models]
    metadata = [read_metadata(path) for path in paths]
    for row, values in (
        ("exit layer", [head["exit_layer"] for head in metadata]),
        ("draft vocabulary", [head["draft_vocabulary"] for head in metadata]),
        ("size", [str(round(path.stat().st_size / 1e6)) for path in paths]),
    ):
        [said] = re.findall(rf"^\| {row} " + 3 * r"\| (\d+) [^|]*" + r"\|$", page, re.MULTILINE)
        assert list(said) == values, row


def test_environment_variables_are_all_on_their_page():
    read = set(re.findall(r"(?:environ(?:\.get)?[\[(]|getenv\()\"(PPSD_(?!FAKE)\w+)", sources(".py", ".cpp")))
    page = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    assert read - set(re.findall(r"PPSD_\w+", page)) == set()


def test_files_that_the_sources_name_exist():
    for path in (ROOT / "csrc").rglob("*.*"):
        for name in COMMENTED.findall(path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_readme_begins_with_the_two_commands_and_is_short():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert [line.split("#")[0].strip() for line in lines[2:6]] == ["```sh", "make run", "make test", "```"]
    assert len(lines) <= 120


def test_readme_goes_on_from_make_run_with_what_works_then():
    sections = README.read_text(encoding="utf-8").split("\n## ")
    assert SHELL.findall(sections[1])[0].startswith(".venv/bin/ppsd-run --chat ")
    assert "uv tool install ." in sections[1] and "pipx install ." in sections[1]
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("\nrun: ")[1].split("\n\n")[0]
    assert recipe.splitlines()[-1].endswith('$(BIN)/ppsd-run --chat"')
    assert (
        PYTHON.findall(sections[1])[0].count("engine.chat(") == PYTHON.findall(API.read_text())[0].count(".chat(") == 1
    )


def test_readme_has_one_table_of_figures_and_they_are_those_of_its_files():
    text = README.read_text(encoding="utf-8")
    assert text.count("---: |\n") == 1  # a column of numbers
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    said = {row[0].split(",")[0]: row[3:] for row in rows if len(row) == 5}
    results = ROOT / "benchmarks/results"
    found = json.loads((results / "2026-11-28-amd-epyc-auto-1.5b.json").read_text())["results"]
    plain, auto = (one["decode_tokens_per_second"] for one in found)
    assert said["Qwen2.5-Coder-1.5B-Instruct"] == [f"{plain:.0f}", f"{auto:.0f} ({auto / plain:.2f}x)"]
    [large] = json.loads((results / "2026-11-25-amd-epyc-memory-8b.json").read_text())["rows"]
    assert said["Llama-3.1-8B-Instruct"] == [f"{large['tokens_per_second']:.0f}", "not measured"]


@pytest.mark.parametrize("page", [README, API], ids=lambda page: page.name)
def test_python_examples_run(page, request, tmp_path, monkeypatch):
    """All blocks of a page one after the other, in one namespace; a folder `model` is there for them."""
    text = page.read_text(encoding="utf-8")
    blocks = list(PYTHON.finditer(text))
    assert blocks
    if any("smollm2-135m" in block[1] for block in blocks):
        request.getfixturevalue("default_model")
    write_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in blocks:
        above = "\n" * text.count("\n", 0, block.start(1))  # errors name the line of the page
        exec(compile(above + block[1], str(page), "exec"), namespace)
