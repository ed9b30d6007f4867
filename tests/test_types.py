"""What a type checker sees of an editable install, by the guide's examples and those of the folder `examples`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """checked(code) -> what mypy says of it, where the installed types are all that it has."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("types")
    made = [sys.executable, "setup.py", "--quiet", "link_types", f"--to={folder}"]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
    (folder / "ppsd_rt-stubs").rename(folder / "ppsd_rt")

    def checked(*codes):
        files = [folder / f"user{number}.py" for number in range(len(codes))]
        for file, code in zip(files, codes, strict=True):
            file.write_text(code, encoding="utf-8")
        options = ["--check-untyped-defs", "--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent"]
        command = [sys.executable, "-m", "mypy", *options, *map(str, files)]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout

    return checked


def test_types_of_an_editable_install_are_seen(checked):
    """In one run of mypy, which takes seconds: right programs without a word, and a wrong one by its line."""
    guide = "\n".join(PYTHON.findall((ROOT / "docs" / "guide" / "python.md").read_text(encoding="utf-8")))
    examples = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))]
    wrong = "from ppsd_rt import Engine\nengine = Engine.from_pretrained('x')\nengine.generate(3.5)\n"
    said = checked(f"{wrong}reveal_type(engine.config)\n", guide, *examples).splitlines()
    assert [line for line in said if line.startswith("user") and not line.startswith("user0.py")] == []
    assert any('user0.py:3: error: Argument 1 to "generate"' in line for line in said)
    assert any("LlamaConfig" in line for line in said)
