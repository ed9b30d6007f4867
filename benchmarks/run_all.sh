#!/usr/bin/env bash
# Every figure of README.md and docs/performance.md, one after the other; each leaves results/DATE-MACHINE-NAME.json.
# An hour on two cores that do nothing else; QUICK=1 does one repeat of everything. `run_all.sh serve start` makes these alone.
# SPEC_BENCH=file.jsonl: Spec-Bench's prompts, which are not in this repository. MODEL_1_5B=file.gguf: a second model.
# llama.cpp is what `build_llama_cpp.sh server` builds; without it our own figures are made.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
machine=$("$python" -c 'import re; from ppsd_rt.cli.info import machine; facts = machine()
cpu = re.sub(r"\(\w+\)|processor", "", facts["cpu"].lower())
print(re.sub("[^a-z0-9]+", "-", cpu + " " + str(facts["cores"])).strip("-"))')
stamp=$(date -u +%Y-%m-%d)-$machine
repeats() { echo "${QUICK:-$1}"; }

# measure NAME COMMAND...: the last line of its output, kept if it succeeds. Only the names that were asked for, if any were.
measure() {
    local name=$1 file="benchmarks/results/$stamp-$1.json"
    shift
    [[ -z $wanted || " $wanted " == *" $name "* ]] || return 0
    echo "$name: $*" >&2
    "$python" "$@" | tail -n 1 > "$file.unfinished"
    mv "$file.unfinished" "$file"
}
wanted=$*

ours=ppsd-rt:int4+auto,ppsd-rt:int4,ppsd-rt:int8+auto,ppsd-rt:int8
measure prompts benchmarks/peers_prompts.py -t 2 -r "$(repeats 3)" --engines "$ours,llama.cpp:file,llama.cpp:Q8_0"
PPSD_ISA=avx2 measure prompts-avx2 benchmarks/peers_prompts.py -t 2 -r "$(repeats 3)" --engines "$ours"
if [ -n "${SPEC_BENCH:-}" ]; then
    measure spec-bench benchmarks/peers_prompts.py -t 2 -r "$(repeats 3)" -n 128 --limit 6 --prompts "$SPEC_BENCH" \
        --engines "$ours,llama.cpp:file"
    measure heads-spec-bench -m ppsd_rt heads auto -n 128 --length 6 --dtype int4 --prompts "$SPEC_BENCH" --output json
fi
measure heads -m ppsd_rt heads auto -n 256 --length 6 --dtype int4 --output json
measure start benchmarks/start.py
measure serve benchmarks/serve.py --clients 1,4,8,16,32 -n 64 -r "$(repeats 3)"
kernels=(-m ppsd_rt lab bench kernels -t 2 --rows 1,4,8,16,64 --dtype int4,int8,bfloat16 -r "$(repeats 9)" --output json)
measure kernels "${kernels[@]}"
measure kernels-avx2 "${kernels[@]}" --isa avx2
measure peers benchmarks/peers.py -t 2 -p 512 -n 128 -r "$(repeats 5)" \
    --engines ppsd-rt:int4,llama.cpp:file,ppsd-rt:int8,ppsd-rt:bfloat16
measure quality -m ppsd_rt lab eval --dtype bfloat16,int8,int4 --output json
if [ -n "${MODEL_1_5B:-}" ]; then
    measure prompts-1.5b benchmarks/peers_prompts.py -m "$MODEL_1_5B" -t 2 -r "$(repeats 2)" -n 128 \
        --engines ppsd-rt:int4+auto,ppsd-rt:int4,llama.cpp:file
    measure start-1.5b benchmarks/start.py -m "$MODEL_1_5B" --fresh 3
fi
