#!/bin/sh
# Real clients against a server with the default model. usage: run.sh PPSD-RUN [CLIENT ...]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
run=$1; shift
work=$here/../../build/clients
mkdir -p "$work/node"
if [ ! "$work/ready" -nt "$here/requirements.txt" ]; then
  "${PYTHON:-python3}" -m venv "$work/venv"
  "$work/venv/bin/pip" install --quiet --requirement "$here/requirements.txt"
  command -v npm >/dev/null && (cd "$work/node" && npm install --silent --no-save openai)
  touch "$work/ready"
fi
model=$work/model  # as a folder, which transformers reads, too
if [ ! -d "$model" ]; then
  "$run" pull >"$work/pull.log" 2>&1
  found=$("${run%/*}/python" -c 'from ppsd_rt.models.resolve import resolve_model; print(resolve_model("smollm2-135m"))')
  case $found in *.gguf) "$run" convert "$found" "$model" ;; *) ln -s "$found" "$model" ;; esac
fi
"$run" serve --model "$model" --model-name smollm2-135m --port 0 --dtype float32 2>"$work/serve.log" &
server=$!
trap 'kill $server; wait $server' EXIT
until grep -q 'http://' "$work/serve.log"; do kill -0 $server; sleep 0.2; done
url=$(grep -o 'http://[0-9.:]*[0-9]' "$work/serve.log" | head -n 1)
"$work/venv/bin/python" "$here/clients.py" "$url" smollm2-135m "$model" "$@"
