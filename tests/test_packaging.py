"""What an installation gives, read off setup.py: no build and no network."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"ppsd_rt": "ppsd_rt", "ppsd_rt.models": "models", "ppsd_rt.triton_kernels": "triton_kernels"}


@pytest.fixture
def wanted(monkeypatch):
    """What setup.py asks setuptools for."""
    setuptools = pytest.importorskip("setuptools")
    asked = {}
    monkeypatch.setattr(setuptools, "setup", asked.update)
    for name in ("cmake", "pybind11"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # needed only to build
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    return asked


def test_nothing_but_ppsd_rt_is_installed(wanted):
    assert {name.partition(".")[0] for name in wanted["packages"]} == {"ppsd_rt"}
    assert [extension.name for extension in wanted["ext_modules"]] == ["ppsd_rt._native"]
    assert wanted["package_dir"] == FOLDERS


def test_every_module_is_in_a_package(wanted):
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.parent.relative_to(ROOT / folder).parts
            assert ".".join([package, *inside]) in wanted["packages"], path


def test_every_data_file_is_in_a_package(wanted):
    for package, folder in FOLDERS.items():
        patterns = wanted["package_data"].get(package, [])
        found = {path for pattern in patterns for path in (ROOT / folder).glob(pattern)}
        others = {p for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc", ".so")}
        assert others == found


def test_a_build_has_nothing_of_earlier_ones(wanted, tmp_path):
    from setuptools import Distribution

    removed = tmp_path / "ppsd_rt" / "removed.py"
    removed.parent.mkdir()
    removed.touch()
    build = wanted["cmdclass"]["build_py"](Distribution({"packages": []}))
    build.build_lib = str(tmp_path)
    build.ensure_finalized()
    build.run()
    assert not removed.exists()


def test_every_requirement_is_pinned_and_torch_is_an_extra():
    names = re.compile(r"^[\w-]+", re.MULTILINE)
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    wanted = [*pyproject["build-system"]["requires"], *project["dependencies"]]
    wanted += [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    pinned = {name.lower() for name in names.findall((ROOT / "constraints.txt").read_text())}
    assert {names.match(requirement)[0].lower() for requirement in wanted} <= pinned | {"ppsd-rt"}
    assert not [requirement for requirement in project["dependencies"] if re.match("torch|triton", requirement)]
    every = project["optional-dependencies"]["all"][0]
    assert set(re.search(r"\[(.*)\]", every)[1].split(",")) == {*project["optional-dependencies"]} - {
        "all",
        "dev",
        "quick",
        "ray",  # whoever has a cluster installs it there
    }


def test_python_in_a_checkout_takes_the_installed_package(tmp_path):
    """The checkout's own folder comes first, and has neither the extension nor models/ in it."""
    checkout, installed = tmp_path / "checkout" / "ppsd_rt", tmp_path / "site" / "ppsd_rt"
    for folder, names in ((checkout, []), (installed, ["models", "_native"])):
        for name in ["", *names]:
            (folder / name).mkdir(parents=True)
            (folder / name / "__init__.py").write_text("")
        (folder / "errors.py").write_text("class PpsdError(Exception): ...\n")
        shutil.copy(ROOT / "ppsd_rt" / "__init__.py", folder)

    def python(code, *path):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
        command = [sys.executable, "-S", "-c", code]  # -S: without the packages of the tests' own environment
        return subprocess.run(command, cwd=checkout.parent, env=environment, capture_output=True, text=True)

    code = "from ppsd_rt import PpsdError; import ppsd_rt.models; print(ppsd_rt.errors.__file__)"
    assert python(code, installed.parent).stdout == f"{installed / 'errors.py'}\n"
    message = f"{checkout} is not built, and ppsd-rt is not installed: run `pip install .` in {checkout.parent}"
    assert python(code).stderr.splitlines()[-1] == f"ImportError: {message}"
    (checkout / "_native.py").write_text("")  # built in place: what setup.py would install inside lies beside it
    (checkout.parent / "models").mkdir()
    (checkout.parent / "models" / "__init__.py").write_text("")
    assert python(code, installed.parent).stdout == f"{checkout / 'errors.py'}\n"


def test_cmake_names_sources_that_an_sdist_carries():
    named = re.findall(r"\b[\w/]+\.cpp\b", (ROOT / "CMakeLists.txt").read_text())
    grafted = re.findall(r"^graft (\w+)$", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE)
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).is_file()
        assert name.partition("/")[0] in grafted


def test_the_workflow_calls_targets_that_exist():
    """It has not run anywhere yet: at least it is YAML, and every command in it is a make target of ours."""
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        program, *called = command.split()
        assert program == "make" and called and set(called) <= targets, command
