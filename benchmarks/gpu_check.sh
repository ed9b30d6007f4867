#!/usr/bin/env bash
# Proves or disproves on one GPU what is claimed of the CUDA backend, in calls of at most ten minutes (LIMIT seconds):
#
#     OUT=results benchmarks/gpu_check.sh smoke proof    the simplest steps first; then all that is not timed, at once:
#                                                        tests of kernels and captured graphs, compute-sanitizer
#     OUT=results benchmarks/gpu_check.sh speed          whole answers: the 8B shape, the 135M shape, formats, an oracle,
#                                                        torch and transformers beside them; memcheck; a table of targets
#     OUT=results benchmarks/gpu_check.sh company        several answers at once, and an EAGLE-3 head
#     OUT=results benchmarks/gpu_check.sh more           kernels one by one, an idle GPU, long texts, larger shapes
#
# Each writes $OUT/gpu.json and $OUT/gpu.txt (the table) after every part, and $OUT/log.txt; a later call adds to an
# earlier gpu.json. Parts are in the order of what they are worth, each has a limit of its own, and one that fails or
# runs out of time stops none of the others: it is interrupted, and what it had measured counts. No GPU: status 1.
#
# Needs a python3 with torch 2.8 or newer, Triton 3.4 or newer, transformers, numpy, pytest with pytest-xdist, cmake and
# pybind11. Where the machine reaches no package index, put what it lacks into .whl/ beforehand (gguf, if anything; for python 3.12:
# `python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 -d .whl gguf hypothesis pytest-timeout`):
# it is installed from there. No model is needed: all shapes are filled with random weights. MODEL=folder, of the default
# model (and `tokenizers`), answers development prompts with it and the head that ships, too.
# What `smoke` found to fail is avoided by what follows: it leaves the switches in $OUT/smoke.env.
# ONLY=name,name runs some of the parts. What was built and compiled stays in build/gpu for the next call. PREBUILT=1:
# build/gpu has come from another machine with the same Python, and is not built again.
# Kernels are carried: `benchmarks/gpu_kernels.py` compiles those of `speed` on any machine, for Triton's version there,
# into build/gpu/triton, which then travels. What is not in it is compiled, and counted at the end.
# DEVICE=cpu rehearses `speed` with a tiny model in Triton's interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
for call in "${@:-none}"; do
    case $call in smoke | speed | proof | company | more) ;; *) echo "usage: benchmarks/gpu_check.sh smoke|speed|proof|company|more ..." >&2; exit 2 ;; esac
done
python=${PYTHON:-python3}
out=${OUT:-build/gpu-results}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
built=$PWD/build/gpu
limit=${LIMIT:-570}
mkdir -p "$out" "$built"
device=${DEVICE:-cuda}
[ "$device" = cuda ] || export TRITON_INTERPRET=1
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=passive PPSD_CACHE="$work/cache" TRITON_CACHE_DIR="$built/triton"
log=$out/log.txt
echo "==== $*" >> "$log"

# part NAME SECONDS COMMAND...: the last line of its output is its result: JSON, or what pytest counted.
part() {
    local name=$1 most=$2 begun=$SECONDS left=$((limit - SECONDS - 10)) status
    shift 2
    if [ -n "${ONLY:-}" ] && [[ ",$ONLY," != *",$name,"* ]]; then return; fi
    [ "$device" = cuda ] || most=$((20 * most))
    if [ "$left" -lt 8 ]; then echo "skipped $name: no time left"; return; fi
    [ "$left" -lt "$most" ] && most=$left
    timeout -s INT -k 8 "$most" "$@" > "$work/$name.out" 2> "$work/$name.log"
    status=$?
    { echo "== $name: $*"; tail -c 20000 "$work/$name.log"; } >> "$log"
    tail -n 40 "$work/$name.out" | cut -c 1-2000 >> "$log"
    tail -n 1 "$work/$name.out" > "$work/$name.json"
    echo "$name $status $((SECONDS - begun))" >> "$work/parts"
    printf '%-22s %4d s  %s\n' "$name" $((SECONDS - begun)) \
        "$([ $status = 0 ] && echo ok || { [ $status -ge 124 ] && echo "out of time" || echo "failed ($status)"; })"
    [ -n "${together:-}" ] || summarise
    return $status
}

kernels() { find "$built/triton" -name '*_kernel.cubin' 2> /dev/null | wc -l; }
carried=$(kernels)
summarise() {
    echo "{\"carried\": $carried, \"compiled\": $(($(kernels) - carried))}" > "$work/kernels.json"
    "$python" benchmarks/gpu_summary.py "$work" "$out/gpu.json" > "$out/gpu.txt"
}

site=$built/site
export PYTHONPATH=$site
build() {
    if ls .whl/*.whl > /dev/null 2>&1; then
        "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" .whl/*.whl || return
    fi
    # The extension, and the packages under the name they are installed by.
    mkdir -p "$site/ppsd_rt"
    if [ -z "${PREBUILT:-}" ] && [ "$device" = cuda ]; then
        cmake -S . -B "$built/build" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")" \
            -Dpybind11_DIR="$("$python" -c 'import pybind11; print(pybind11.get_cmake_dir())')" \
            -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$site/ppsd_rt" > /dev/null || return
        cmake --build "$built/build" --target _native --parallel "$(nproc)" > /dev/null || return
    fi
    local item
    ln -sfn "$PWD/benchmarks/gpu_kernels.py" "$site/"
    for item in "$PWD"/ppsd_rt/* "$PWD/models" "$PWD/triton_kernels"; do case $device$item in cuda*.so) ;; *) ln -sfn "$item" "$site/ppsd_rt/" ;; esac; done
    "$python" -P - "$device" <<'PYTHON'
import json, sys, torch, triton
from ppsd_rt import _native
import ppsd_rt.models.config, ppsd_rt.triton_kernels.linear
if sys.argv[1] != "cuda":
    print(json.dumps({"gpu": "none: a rehearsal"}))
    raise SystemExit
if not torch.cuda.is_available():
    raise SystemExit("gpu_check: torch sees no GPU on this machine")
gpu = torch.cuda.get_device_properties(0)
print(json.dumps({"gpu": gpu.name, "torch": torch.__version__, "triton": triton.__version__, "isa": _native.isa()}))
PYTHON
}
export -f build
export python site built device
part build 90 bash -c build || { tail -n 3 "$log" >&2; exit 1; }
[ "$device" = cuda ] && export TRITON_CACHE_MANAGER=gpu_kernels:Carried
run="$python -P -m ppsd_rt"
tokens="-n 128 -p 64 -r 3" formats=bfloat16,int8,int4,fp8 half=bfloat16
if [ "$device" != cuda ]; then tokens="-n 2 -p 2 -r 1" formats=float32,int4 half=float32; fi
generate="$run lab bench generate --backend cuda --device $device $tokens --output json"
schedules="--schedule auto --schedule eesd:length=3,stop_rule=fixed --schedule eesd:length=5,stop_rule=fixed
    --schedule eesd --schedule ppsd --schedule elastic --schedule elastic:first_chunk=0 --schedule elastic:max_chunk=4"
plain="--exit-head none --schedule plain" oracle="--oracle 0.6,0.8,0.9"
kernels="$run lab bench kernels --device cuda --rows 1,16 --output json"
baseline="$python -P benchmarks/gpu_baseline.py --device $device --dtype $half"
small="random:smollm2-135m --exit-head norm:6:8192" middle="random:llama-3.2-1b --exit-head norm:2:16384"
large="random:llama-3.1-8b --exit-head norm:4:16384"
if [ "$device" != cuda ]; then
    PYTHONPATH=$site:tests "$python" -P -c "import sys, pathlib, support; support.write_model(pathlib.Path(sys.argv[1]))" "$work/tiny"
    small="$work/tiny --exit-head norm:1" middle=$small large=$small
    schedules="--schedule eesd:length=3,stop_rule=fixed" oracle="--oracle 0.8"
fi
# Tests of one file go to several processes: each compiles what it launches.
pytest="$python -P -m pytest -q -p no:cacheprovider --dist worksteal"
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
memcheck="$sanitizer --tool memcheck --report-api-errors no --error-exitcode 9"
[ "$device" = cuda ] || memcheck=

# Kernels are compiled for all shapes at once, on all cores; the parts that are measured find them in the cache.
# Jobs of their own process groups hear of an interrupt, which the shell's background jobs ignore otherwise.
warm() {
    local shape
    set -m
    trap 'kill -INT $(jobs -p) 2> /dev/null; wait; exit 130' INT   # and starts no more
    for shape in "$small" "$middle" "$large" "$large --dtype int8" "$large --dtype int4" "$large --dtype fp8"; do
        $run lab bench generate --backend cuda --device cuda -m $shape -n 16 -p 64 -r 1 --output json --oracle 0.8 \
            --schedule eesd:length=3,stop_rule=fixed --schedule elastic > /dev/null &
    done
    wait
}
export -f warm
export run small middle large

export work

for call in "$@"; do
    # shellcheck disable=SC1091
    if [ -f "$out/smoke.env" ]; then . "$out/smoke.env"; fi
    case $call in
    smoke)
        part smoke 240 "$python" -P benchmarks/gpu_smoke.py --out "$out/smoke.json"
        ;;
    proof)   # none of it is timed, so all of it runs at once
        together=1
        set -m   # or an interrupt does not reach them
        part tests-kernels 180 $pytest -n 4 tests/triton_kernels/test_on_gpu.py &
        part tests-captured 180 $pytest -n 4 tests/ppsd_rt/cuda/test_on_gpu.py &
        {
            part compiled 60 $python benchmarks/gpu_sanitize.py --tokens 4 --formats int4
            part memcheck 120 $memcheck $python benchmarks/gpu_sanitize.py --tokens 4 --formats int4 &
            part racecheck 120 "$sanitizer" --tool racecheck --error-exitcode 9 $python benchmarks/gpu_sanitize.py --tokens 2 --formats int4 &
            wait
        } &
        part warm 120 bash -c warm &
        wait
        set +m
        together=
        summarise
        ;;
    speed)   # in the order of what it is worth; nothing else runs meanwhile, but for compiling at first
        [ "$device" != cuda ] || part warm 60 bash -c warm
        part answers-8b 35 $generate -m $large $plain
        part answers-135m 25 $generate -m $small $plain
        part answers-1b 25 $generate -m $middle $plain
        part answers-formats 65 $generate -m $large $plain --dtype $formats
        part oracle-8b 60 $generate -m $large $oracle $schedules
        part oracle-135m 40 $generate -m $small $oracle $schedules
        part baseline-8b 55 $baseline -m ${large%% *}
        part baseline-135m 40 $baseline -m ${small%% *}
        part baseline-1b 40 $baseline -m ${middle%% *}
        part memcheck 35 $memcheck $python benchmarks/gpu_sanitize.py --device $device --tokens 2 --formats int4
        ;;
    company)
        part company-8b 200 $python -P benchmarks/gpu_company.py -m ${large%% *}
        part company-135m 120 $python -P benchmarks/gpu_company.py -m ${small%% *}
        ;;
    more)
        part kernels-135m 35 $kernels -m $small -r 7
        part kernels-8b 35 $kernels -r 5 -m random:llama-3.1-8b
        part idle-135m 30 $python benchmarks/gpu_idle.py -m $small
        part kernels-1b 30 $kernels -r 5 -m random:llama-3.2-1b
        part kernels-8b-4k 20 $kernels -r 5 -m random:llama-3.1-8b --context 4096 --kernels attention
        part kernels-8b-8k 20 $kernels -r 5 -m random:llama-3.1-8b --context 8192 --kernels attention
        part kernels-8b-int8 30 $kernels -r 3 -m random:llama-3.1-8b --dtype int8
        part kernels-8b-int4 30 $kernels -r 3 -m random:llama-3.1-8b --dtype int4
        if [ -n "${MODEL:-}" ]; then
            part answers-default 60 $run lab bench generate --backend cuda --device cuda -m "$MODEL" --prompts --limit 2 -n 128 -r 3 \
                --schedule auto --schedule eesd --schedule elastic --output json
        fi
        part answers-8b-far 50 $generate -m $large --oracle 0.8 -p 4000,8000 -r 1 --schedule elastic --schedule eesd:length=5,stop_rule=fixed
        part answers-13b 50 $generate -m random:llama-2-13b --exit-head norm:5 -r 1 $oracle $schedules
        part answers-70b-int8 90 $generate -m random:llama-2-70b --dtype int8 --exit-head norm:10 -n 64 -r 1 $oracle $schedules
        ;;
    esac
done
cat "$out/gpu.txt"
echo "kernels: $carried carried, $(($(kernels) - carried)) compiled here"
