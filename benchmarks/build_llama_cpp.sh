#!/usr/bin/env bash
# llama.cpp for this machine, as the peer of ppsd-rt: a Release build with -march=native of the sources that
# llama-cpp-python carries (so that a package index is all it takes). Some minutes on two cores.
# Leaves benchmarks/llama.cpp/build/bin/libllama.so, where llama_library.py looks for it; with the argument `server`,
# which takes some minutes more, also llama-server, llama-batched-bench and llama-completion beside it, for serve.py and start.py.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
version=0.3.36

if [ ! -d llama.cpp/source ]; then
    mkdir -p llama.cpp
    "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest llama.cpp "llama-cpp-python==$version"
    tar -C llama.cpp -xzf llama.cpp/llama_cpp_python-$version.tar.gz
    mv llama.cpp/llama_cpp_python-$version/vendor/llama.cpp llama.cpp/source
    rm -r llama.cpp/llama_cpp_python-$version llama.cpp/llama_cpp_python-$version.tar.gz
fi
# On a Xeon with AMX (Sapphire Rapids) a build of 0.3.36 that uses it ends in a segmentation fault at the first token.
without=()
if grep -q amx_int8 /proc/cpuinfo 2> /dev/null; then
    amx="-mno-amx-int8 -mno-amx-tile -mno-amx-bf16"
    without=("-DCMAKE_C_FLAGS=$amx" "-DCMAKE_CXX_FLAGS=$amx")
fi
server=OFF targets=(llama) files=(libllama.so)
if [ "${1:-}" = server ]; then
    server=ON targets+=(llama-server llama-batched-bench llama-completion) files+=(llama-server llama-batched-bench llama-completion)
fi
cmake -S llama.cpp/source -B llama.cpp/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON \
    -DLLAMA_BUILD_COMMON="$server" -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS="$server" \
    -DLLAMA_BUILD_SERVER="$server" -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_CURL=OFF "${without[@]}"
cmake --build llama.cpp/build --target "${targets[@]}" --parallel "${JOBS:-$(nproc)}"
cd llama.cpp/build/bin
ls -l "${files[@]}"
