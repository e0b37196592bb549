#!/usr/bin/env bash
# demo.sh BIN: serves SmolLM2-135M-Instruct, fetched once, and prints its address and a request to try.
# Where it cannot be fetched, a small model of random weights serves. TPDET_MODEL names another model.
set -euo pipefail
trap 'exit 0' INT TERM # a stop, which make would call an error
bin=$1
run=run/demo
python=${PYTHON:-$bin/python}
"$python" -m pip --version >/dev/null 2>&1 || python=$bin/python
model=${TPDET_MODEL:-models/smollm2}
if [ -z "${TPDET_MODEL:-}" ]; then
    "$python" scripts/fetch_model.py "$model" || {
        code=$?
        [ "$code" -eq 69 ] || exit "$code"
        model=models/demo
        [ -d "$model" ] || "$python" scripts/progress.py \
            "making $model, a small model of random weights: its answers mean nothing" \
            "$bin/tpdet" make-model "$model" --like qwen3
    }
fi
# Two ranks where the model can be cut for them, else one.
tp=$("$bin/python" - "$model" <<'PY'
import sys
from tpdet.errors import TpdetError, UsageError
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.fit import check_ranks
from tpdet.checkpoint.resolve import resolve_model
try:
    check_ranks(load_model_config(resolve_model(sys.argv[1])), 2, None)
    print(2)
except UsageError:
    print(1)
except TpdetError as error:
    print(f"tpdet: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
PY
)
rm -f "$run/ready.json"
server=$$
(
    while kill -0 "$server" 2>/dev/null; do
        if [ -f "$run/ready.json" ]; then
            "$bin/python" - "$run/ready.json" "$bin" <<'PY'
import json, sys
ready = json.load(open(sys.argv[1]))
url = ready["url"]
print(f"\ntpdet is ready at {url}  ({ready['system_fingerprint']}, TP {ready['tp']})\ntry:\n"
      f"  curl -s {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
      "    -d '{\"model\": \"demo\", \"messages\": [{\"role\": \"user\", \"content\": "
      "\"What is the capital of France?\"}], \"max_tokens\": 40, \"temperature\": 0}'\n"
      f"  {sys.argv[2]}/tpdet chat --url {url}\nCtrl-C drains and stops.\n", flush=True)
PY
            exit 0
        fi
        sleep 0.2
    done
) &
exec "$bin/tpdet" serve --config configs/demo.toml --model "$model" --tp "$tp"
