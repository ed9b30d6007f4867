"""The package layout and the C++ extension. Everything else about the project stands in pyproject.toml.

The top-level folders `models/` and `triton_kernels/` install *inside* `ppsd_rt`, so that nothing called `models` lands
in anybody's site-packages. CMakeLists.txt builds the extension `ppsd_rt._native`.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import ClassVar, TextIO

import cmake
import pybind11
from setuptools import Command, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

# A PEP 517 build does not have this folder on its path.
sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_machine

FOLDERS = {"ppsd_rt": "ppsd_rt", "ppsd_rt.models": "models", "ppsd_rt.triton_kernels": "triton_kernels"}

packages = []
for package, folder in FOLDERS.items():
    packages += [package, *(f"{package}.{found}" for found in find_packages(folder))]


class FreshBuild(build_py):
    """Without the modules of earlier builds, which setuptools would install although their sources are gone."""

    def run(self) -> None:  # the first step of every build
        if lacking := check_machine.missing_for_build():
            raise SystemExit(f"error: {lacking}")
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class LinkTypes(Command):
    """Links that show the types of an editable install to type checkers, which follow no import hooks (PEP 561).

    As a stub package beside it: nothing is imported from there.
    """

    user_options: ClassVar = [("to=", None, "the folder for ppsd_rt-stubs [site-packages]")]

    def initialize_options(self) -> None:
        self.to = sysconfig.get_path("purelib")

    def finalize_options(self) -> None:
        self.stubs = Path(self.to, "ppsd_rt-stubs")

    def run(self) -> None:
        shutil.rmtree(self.stubs, ignore_errors=True)
        for package, folder in FOLDERS.items():
            for path in [*Path(folder).rglob("*.py"), *Path(folder).rglob("*.pyi"), *Path(folder).glob("py.typed")]:
                link = self.stubs.joinpath(*package.split(".")[1:], path.relative_to(folder))
                link.parent.mkdir(parents=True, exist_ok=True)
                link.with_suffix(".pyi" if path.suffix == ".py" else path.suffix).symlink_to(path.absolute())


class CMakeBuild(build_ext):
    """Configures and builds with CMake, and leaves the module where setuptools expects it.

    One build folder for each interpreter and compiler serves `pip install`, editable or not, and `pip wheel`: what one
    has compiled, the others only link.
    """

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        source = Path(__file__).resolve().parent
        kind = f"{sys.implementation.cache_tag} {sysconfig.get_platform()} {os.environ.get('CXX', '')}"
        build = source / "build" / re.sub(r"\W+", "-", kind).strip("-")
        program = str(Path(cmake.CMAKE_BIN_DIR) / "cmake")
        configure = [
            program,
            f"-S{source}",
            f"-B{build}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
            f"-DPPSD_KERNELS={os.environ.get('PPSD_KERNELS') or 'all'}",
            f"-DPPSD_TESTING={os.environ.get('PPSD_TESTING') or 'OFF'}",
        ]
        if shutil.which("ccache") and "CMAKE_CXX_COMPILER_LAUNCHER" not in os.environ:
            os.environ["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
        os.environ.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros")  # it skips precompiled headers otherwise
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        log = build / "log.txt"
        build.mkdir(parents=True, exist_ok=True)
        with log.open("w+") as lines:
            for command in (configure, [program, "--build", str(build), "--target", "_native", "--parallel", jobs]):
                run(command, lines)


def run(command: list[str], log: TextIO) -> None:
    """Runs a step of the build and prints its progress in tenths. SystemExit with the first error if it fails."""
    shown = -1
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            found = re.match(r"\[ *(\d+)%\] Building", line)
            if found and int(found[1]) // 10 > shown:
                shown = int(found[1]) // 10
                print(f"  compiling: {10 * shown} %", flush=True)
    if process.returncode:
        log.flush()
        lines = Path(log.name).read_text().splitlines()
        errors = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)]
        raise SystemExit(
            f"error: {(errors or lines or ['CMake ended without a word'])[0].strip()}\n(all of it: {log.name})"
        )


setup(
    packages=packages,
    package_dir=FOLDERS,
    include_package_data=False,  # package_data says it all
    package_data={
        "ppsd_rt": [
            "py.typed",
            "_native.pyi",
            "data/*.json",
            "data/*.jsonl",
            "data/*.txt",
            "serve/page.html",
            "serve/*.js",
        ],
        "ppsd_rt.models": ["heads/*.safetensors"],
    },
    ext_modules=[Extension("ppsd_rt._native", sources=[])],
    cmdclass={"build_py": FreshBuild, "build_ext": CMakeBuild, "link_types": LinkTypes},
)
