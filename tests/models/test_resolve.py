"""Every form in which a model can be named, and every way in which a name can be wrong.

The hub is a small HTTP server on this machine that speaks as much of the hub's protocol as a snapshot needs; it is
asked by the real `huggingface_hub`, in a process of its own, because that package reads its settings when imported.
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support import small_gguf

from ppsd_rt import Engine, PpsdError, UsageError
from ppsd_rt.models import resolve
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.random_weights import SHAPES, RandomCheckpoint
from ppsd_rt.models.resolve import resolve_model


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def refusal(name: str, **options: bool) -> str:
    with pytest.raises(PpsdError) as caught:
        resolve_model(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Local models
# ---------------------------------------------------------------------------------------------------------------------


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path / "org"))
    assert resolve_model(str(folder)) == folder
    assert resolve_model("org/name").samefile(folder)  # what is here is not asked for on the hub
    assert resolve_model("./org/name/").samefile(folder)
    assert resolve_model("~/name") == folder


def test_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty holds no config.json" in refusal("empty")
    (tmp_path / "empty" / "some.gguf").touch()
    assert "name the file empty/some.gguf" in refusal("empty")


def test_gguf_is_taken_as_it_is(tmp_path: Path, empty_cache: Path) -> None:
    path = small_gguf(tmp_path / "My [model] v1.GGUF")
    assert resolve_model(str(path)) == path
    assert resolve_model(f"./{path.name}").samefile(path)
    assert Checkpoint(resolve_model(path.name)).tensors["model.norm.weight"][0] == 0.5
    assert not empty_cache.exists()


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "is a file, but not a .gguf file" in refusal("model.safetensors")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "neither a folder nor a regular file" in refusal("pipe.gguf")
    assert "neither a folder nor a regular file" in refusal("/dev/zero")


@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/where", "~/nowhere", "a/b/c", "nowhere.gguf", "org/m.gguf", "x/", "a\\b"]
)
def test_paths_that_do_not_exist(name: str) -> None:
    assert refusal(name) == f"{name} does not exist"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-70b", "'llama-70b' is not a model: give a model folder, a .gguf file, smollm2-135m, or a hub name"),
        ("", "'' is not a model: give"),
        ("a b/c", "'a b/c' is not a model: give"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "'a\\x00b' is not a model"),
    ],
)
def test_names_that_mean_nothing(name: str, expected: str) -> None:
    assert expected in refusal(name)


@pytest.mark.parametrize("name", ["smollm2-135m", "default"])
def test_default_model_wins_over_a_folder_of_its_name(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.setattr(resolve, "default_model", lambda: tmp_path / "the model")
    assert resolve_model(name) == tmp_path / "the model"
    assert resolve_model(f"./{name}").samefile(tmp_path / name)


def test_random_weights_have_the_sizes_of_their_models():
    assert {name: RandomCheckpoint(f"random:{name}").parameters for name in SHAPES} == {
        "smollm2-135m": 134_515_008,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.1-8b": 8_030_261_248,
        "llama-2-13b": 13_015_864_320,
        "llama-2-70b": 68_976_648_192,
    }


def test_random_weights_that_cannot_be_made_are_refused():
    with pytest.raises(PpsdError, match="shapes to fill with random weights are smollm2-135m"):
        RandomCheckpoint("random:gpt-4")
    with pytest.raises(UsageError, match="use --backend cuda"):
        Engine.from_pretrained("random:llama-3.2-1b")


# ---------------------------------------------------------------------------------------------------------------------
# The hub
# ---------------------------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORIES = {
    "org/model": {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"{}",
        "tokenizer.model": b"pieces",
        "chat_template.jinja": b"{{ messages }}",
        "README.md": b"# not needed",
        "pytorch_model.bin": b"the same weights",
        "consolidated.safetensors": b"the same weights",
        "onnx/config.json": b"{}",
    },
    "org/gguf": {
        **{f"m-{tag}.gguf": tag.encode() for tag in ("BF16", "IQ4_XS", "Q4_K_M", "Q8_0", "UD-Q4_K_M")},
        **{f"Q6_K/m-Q6_K-0000{part}-of-00002.gguf": b"%d" % part for part in (1, 2)},
        "mmproj-m-Q4_K_M.gguf": b"for images",
        "config.json": b"{}",
    },
    "org/small": {"b-Q8_0.gguf": b"b", "a-F16.gguf": b"a"},
    "org/nothing": {"README.md": b"# soon"},
}


class Hub(BaseHTTPRequestHandler):
    """What a snapshot asks for: the commit and its files, then each file."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.answer_about("/".join(parts[2:4]), tree="tree" in parts)
        else:
            self.answer_with_file("/".join(parts[:2]), "/".join(parts[4:]))

    def answer_about(self, name: str, tree: bool) -> None:
        if name == "org/gated":
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if name not in REPOSITORIES:
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        files = REPOSITORIES[name]
        listed = [{"type": "file", "path": file, "size": len(data), "oid": "0"} for file, data in files.items()]
        info = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
        return self.answer(200, json.dumps(listed if tree else info).encode())

    def answer_with_file(self, name: str, file: str) -> None:
        data = REPOSITORIES[name][file]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        self.answer(200, data, headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for header, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Not on the test's output."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    if importlib.util.find_spec("huggingface_hub") is None:
        pytest.skip("huggingface_hub is not installed")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


NOWHERE = "http://127.0.0.1:9"
ASK = """
import sys
from ppsd_rt.errors import PpsdError
from ppsd_rt.models.resolve import resolve_model
for request in sys.argv[1:]:
    try:
        print("folder", resolve_model(request))
    except PpsdError as error:
        print("error", error)
"""


def ask(tmp_path: Path, endpoint: str, *requests: str, **more: str) -> list[str]:
    """What `resolve_model` says to each request in a new process that knows the hub at `endpoint`."""
    patience = "600"  # seconds: the machine may be busy
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    settings |= {"HF_HUB_ETAG_TIMEOUT": patience, "HF_HUB_DOWNLOAD_TIMEOUT": patience}
    command = [sys.executable, "-c", ASK, *requests]
    done = subprocess.run(command, env=os.environ | settings | more, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def test_hub_snapshot(tmp_path: Path, hub: str) -> None:
    (fetched,), (late,) = ask(tmp_path, hub, "org/model"), ask(tmp_path, NOWHERE, "org/model")
    assert fetched.startswith("folder ")
    assert late == fetched
    folder = Path(fetched.removeprefix("folder "))
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja"}
    assert {path.name for path in folder.iterdir()} == expected
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("late", [False, True])
def test_one_gguf_file_by_its_quantisation(tmp_path: Path, hub: str, late: bool) -> None:
    """As llama.cpp's -hf: no matter the case; Q4_K_M, or else the first one, where nothing is said; also offline."""
    wanted = {
        "org/gguf:q8_0": "m-Q8_0.gguf",
        "org/gguf:Q4_K_M": "m-Q4_K_M.gguf",
        "org/gguf": "m-Q4_K_M.gguf",
        "org/gguf:m-IQ4_XS.gguf": "m-IQ4_XS.gguf",
        "org/gguf:Q6_K": "Q6_K/m-Q6_K-00001-of-00002.gguf",
        "org/small": "a-F16.gguf",
    }
    answers = ask(tmp_path, hub, *wanted)
    if late:
        again = [name for name in wanted if ":" in name]
        assert ask(tmp_path, NOWHERE, *again) == [answers[list(wanted).index(name)] for name in again]
        return
    for answer, (name, file) in zip(answers, wanted.items(), strict=True):
        path = Path(answer.removeprefix("folder "))
        assert str(path).endswith(f"/{COMMIT}/{file}")
        assert path.read_bytes() == REPOSITORIES[name.partition(":")[0]][file]
    folder = Path(answers[4].removeprefix("folder ")).parents[1]
    there = {str(path.relative_to(folder)) for path in folder.rglob("*.gguf")}
    assert there == {file for name, file in wanted.items() if name != "org/small"} | {"Q6_K/m-Q6_K-00002-of-00002.gguf"}


def test_hub_refusals(tmp_path: Path, hub: str) -> None:
    names = ("org/none", "org/gated", "org/nothing", "org/o..dd", "org/gguf:Q3_K", "org/model:Q8_0")
    missing, gated, no_weights, odd, no_tag, no_gguf = ask(tmp_path, hub, *names)
    assert missing == "error there is no folder org/none here and no model org/none on the hub (or it is private)"
    assert gated == "error org/gated is gated: accept its terms on the hub, then log in with `hf auth login`"
    assert no_weights == "error org/nothing on the hub has neither config.json with *.safetensors nor a .gguf file"
    assert no_tag.startswith(
        "error org/gguf on the hub has no .gguf file for 'Q3_K'; its .gguf files are: Q6_K/m-Q6_K-0"
    )
    assert no_gguf == "error org/model on the hub has no .gguf file for 'Q8_0'; its .gguf files are: none"
    assert odd.startswith("error org/o..dd could not be fetched from the hub: ")


def test_hub_out_of_reach(tmp_path: Path, hub: str) -> None:
    (answer,) = ask(tmp_path, NOWHERE, "org/model")
    assert answer == "error org/model is neither a folder here nor in the hub's cache, and the hub cannot be reached"
    (offline,) = ask(tmp_path, hub, "org/model", HF_HUB_OFFLINE="1")
    assert offline.endswith("nor in the hub's cache, and HF_HUB_OFFLINE=1 forbids asking it: unset it")
