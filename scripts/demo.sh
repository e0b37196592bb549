#!/usr/bin/env bash
# Starts the demo server and prints its address and a request to try, once it takes requests.
set -euo pipefail
bin=$1
run=run/demo
rm -f "$run/ready.json"
server=$$
(
    while kill -0 "$server" 2>/dev/null; do
        if [ -f "$run/ready.json" ]; then
            "$bin/python" - "$run/ready.json" <<'PY'
import json, sys
ready = json.load(open(sys.argv[1]))
url = ready["url"]
print(f"\ntpdet is ready at {url}  ({ready['system_fingerprint']}, TP {ready['tp']})\ntry:\n"
      f"  curl -s {url}/v1/completions -H 'content-type: application/json' \\\n"
      "    -d '{\"model\": \"demo\", \"prompt\": \"The for statement\", \"max_tokens\": 24, "
      "\"temperature\": 0}'\nCtrl-C drains and stops.\n", flush=True)
PY
            exit 0
        fi
        sleep 0.2
    done
) &
exec "$bin/tpdet" serve --config configs/demo.toml --tp 2
