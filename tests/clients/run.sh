#!/bin/sh
# Real clients against a server with the default model. usage: run.sh PPSD-RUN [CLIENT ...] [-CLIENT ...]
# Exit status 75: they cannot be installed here.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
run=$1; shift
python=${run%/*}/python
work=$here/../../build/clients
mkdir -p "$work/node"
if [ ! "$work/ready" -nt "$here/requirements.txt" ] || [ ! "$work/ready" -nt "$here/package.json" ]; then
  "$python" -m venv "$work/venv"
  # torch and others of the project's environment are seen from this one, and not installed twice
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
  "$work/venv/bin/pip" install --quiet --requirement "$here/requirements.txt" || exit 75
  cp "$here/package.json" "$work/node/"
  (cd "$work/node" && npm install --silent) || exit 75
  touch "$work/ready"
fi
model=$work/model  # as a folder, which transformers reads, too
if [ ! -d "$model" ]; then
  "$run" pull >"$work/pull.log" 2>&1
  found=$(PYTHONPATH=$here/../../benchmarks "$python" -c 'from export_gguf import model_folder; print(model_folder("smollm2-135m"))')
  ln -s "$found" "$model"
fi
: >"$work/serve.log"  # or the address of the last one may be found there
"$run" serve --model "$model" --model-name smollm2-135m --port 0 --dtype float32 2>>"$work/serve.log" &
server=$!
trap 'kill $server; wait $server' EXIT
until grep -q 'http://' "$work/serve.log"; do kill -0 $server; sleep 0.2; done
url=$(grep -o 'http://[0-9.:]*[0-9]' "$work/serve.log" | head -n 1)
"$work/venv/bin/python" "$here/clients.py" "$url" smollm2-135m "$model" "$@"
