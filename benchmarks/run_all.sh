#!/usr/bin/env bash
# Every benchmark, one after the other; each leaves benchmarks/results/DATE-MACHINE-NAME.json. Half an hour on two cores;
# QUICK=1 does one repeat of everything, to see that it runs. The machine should do nothing else meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
repeats=${QUICK:+1}
repeats=${repeats:-7}
threads=$("$python" -c 'from ppsd_rt import _native; n = len(_native.usable_cores()); print(",".join(map(str, sorted({1, n}))))')
machine=$("$python" -c 'import re; from ppsd_rt.cli.info import machine; facts = machine()
print(re.sub("[^a-z0-9]+", "-", (facts["cpu"] + " " + str(facts["cores"])).lower()).strip("-"))')
stamp=$(date -u +%Y-%m-%d)-$machine
mkdir -p benchmarks/results

# measure NAME COMMAND...: the last line of its output, kept if it succeeds.
measure() {
    local file="benchmarks/results/$stamp-$1.json"
    shift
    echo "$*" >&2
    "$python" "$@" --output json | tail -n 1 > "$file.unfinished"
    mv "$file.unfinished" "$file"
}

bench=(-m ppsd_rt lab bench)
drafts=(--schedule auto --schedule eesd:stop_rule=fixed --schedule eesd --schedule ppsd --schedule elastic)

measure kernels "${bench[@]}" kernels --dtype int8,bfloat16,float32 -t "$threads" -r "$repeats"
measure instruction-sets "${bench[@]}" kernels --isa all --dtype int8,bfloat16 -t 1 --rows 1,4,16 -r "$repeats"
measure plain "${bench[@]}" generate --dtype int8,bfloat16,float32 -t "$threads" -p 64,512 --schedule plain -r "$repeats"
if "$python" -m ppsd_rt info --json | grep -q '"exit_layer"'; then
    measure prompts "${bench[@]}" generate --prompts -t "$threads" "${drafts[@]}" -r "${QUICK:-3}"
    head=auto
else
    head=norm:3  # no head ships for this model: its own norm and LM head do the work of one, and the oracle the drafting
fi
for acceptance in 0.5 0.6 0.7 0.8 0.9; do  # one by one: `auto` learns from every draft that it sees
    measure "oracle-$acceptance" "${bench[@]}" generate --exit-head "$head" --oracle "$acceptance" -t "$threads" \
        "${drafts[@]}" -r "$repeats"
done
measure quality -m ppsd_rt lab eval --dtype bfloat16,int8
measure peers benchmarks/peers.py -t "$threads" -r "$repeats"
measure peers-prompts benchmarks/peers_prompts.py -r "${QUICK:-3}"
measure peers-quality benchmarks/peers.py --quality
