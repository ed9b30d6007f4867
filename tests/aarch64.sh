#!/usr/bin/env bash
# The C++ half for AArch64, tested on an x86-64 machine: cross-compiled, and run by QEMU's emulator of the processor.
#
#   tests/aarch64.sh FOLDER [PYTEST ARGUMENTS]      e.g. build/aarch64 tests/ppsd_rt/cpu/test_int4.py -k "neon or dotprod"
#
# For Debian 12, as root, in the development environment (.venv/bin on the PATH): it installs a cross compiler and the
# emulator, and unpacks Python for arm64 into FOLDER, which the next run uses again. The build takes two minutes, and every
# test thirty to a hundred times as long as it should.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '4,5s/^# *//p' "$0" >&2; exit 2; }
mkdir -p "$1"
at=$(cd "$1" && pwd)
shift
here=$(cd "$(dirname "$0")/.." && pwd)
root=$at/root
emulated="qemu-aarch64-static -L $root $root/usr/bin/python3.11"

if [ ! -e "$root/usr/bin/python3.11" ]; then
  dpkg --add-architecture arm64
  apt-get -qq update
  apt-get -qq install -y --no-install-recommends qemu-user-static g++-aarch64-linux-gnu
  mkdir -p "$at/packages"
  (cd "$at/packages" && apt-get -qq download {python3.11,python3.11-minimal,libpython3.11-minimal,libpython3.11-stdlib}:arm64 \
    {libpython3.11-dev,libc6,libgcc-s1,libstdc++6,zlib1g,libexpat1,libffi8,libssl3,libbz2-1.0,liblzma5,libuuid1,libgomp1}:arm64)
  for package in "$at"/packages/*.deb; do dpkg-deb -x "$package" "$root"; done
fi
if [ ! -e "$at/site/torch" ]; then   # torch 2.13 for these processors wants CUDA's libraries, 2.8 does not
  python3 -m pip install -q --target "$at/site" --no-deps --only-binary=:all: --python-version 3.11 \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 --platform any \
    torch==2.8.0 numpy pyyaml requests scipy safetensors gguf sentencepiece jinja2 markupsafe regex tokenizers typing_extensions sympy \
    mpmath networkx filelock fsspec tqdm rich pygments markdown-it-py mdurl hypothesis sortedcontainers pytest pytest-timeout pluggy iniconfig packaging
fi
cmake -S "$here" -B "$at/build" -DCMAKE_BUILD_TYPE=Release -DPPSD_TESTING=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS="-idirafter $root/usr/include" \
  -DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=NEVER -DPython_EXECUTABLE="$(command -v python3)" \
  -DPython_INCLUDE_DIR="$root/usr/include/python3.11" -DPYTHON_MODULE_EXTENSION=.cpython-311-aarch64-linux-gnu.so \
  -DPYBIND11_USE_CROSSCOMPILING=ON -Dpybind11_DIR="$(python3 -m pybind11 --cmakedir)" > "$at/cmake.log"
cmake --build "$at/build" --target _native -j "$(nproc)" > "$at/build.log"

rm -rf "$at/packages_of_ours"   # as they would be installed
mkdir -p "$at/packages_of_ours/ppsd_rt"
ln -s "$here"/ppsd_rt/* "$here/models" "$here/triton_kernels" "$at/packages_of_ours/ppsd_rt/"
rm -f "$at"/packages_of_ours/ppsd_rt/_native*.so
cp "$at"/build/_native*.so "$at/packages_of_ours/ppsd_rt/"
cd "$here"
export PYTHONPATH=$at/packages_of_ours:$at/site PYTHONDONTWRITEBYTECODE=1
exec $emulated -P -m pytest -p no:cacheprovider -o addopts="--import-mode=importlib" --timeout=3000 "$@"
