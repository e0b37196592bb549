#!/usr/bin/env bash
# Times LLM.generate and HTTP beside vLLM's, one size after the other on the same GPUs, in one call.
#   scripts/beside_vllm.sh MODEL "4 8" docs/results
# MODEL is a directory: with a config alone, LOAD_FORMAT=dummy gives both engines random weights; without
# a tokenizer HTTP is left out. VLLM_PYTHON (python3): the interpreter that has vLLM.
# PORT (8101): vLLM's, ours is the next one; both servers run at once, with 0.42 of the memory each.
# Ends with 1 where a size failed, behind the others.
set -euo pipefail
if [ $# -ne 3 ]; then
    echo "usage: $0 MODEL \"SIZES\" RESULTS" >&2
    exit 2
fi
model=$(cd "$1" && pwd) results=$3 root=$(cd "$(dirname "$0")/.." && pwd)
load=${LOAD_FORMAT:-auto} vllm=${VLLM_PYTHON:-python3} port=${PORT:-8101}
folder=$(mktemp -d) failed=0
servers=()
stop() {
    [ ${#servers[@]} -eq 0 ] || kill "${servers[@]}" 2>/dev/null || true
    wait
    servers=()
}
trap 'stop; rm -rf "$folder"' EXIT

await() { # await PORT PID LOG: until the server there answers
    until python3 -c "from urllib import request as r; r.urlopen('http://127.0.0.1:$1/v1/models')" 2>/dev/null; do
        kill -0 "$2" 2>/dev/null || { tail -n 20 "$3" >&2; return 1; }
        sleep 1
    done
}

offline() { # offline TP: theirs, then ours beside it
    PYTHONPATH=$root "$vllm" "$root/scripts/vllm_generate.py" "$model" "$1" "$folder/vllm.$1.json" \
        load_format="\"$load\"" max_model_len=8192 max_num_seqs=256 enable_prefix_caching=false &&
        python3 -m tpdet bench generate "$model" --tp "$1" --load-format "$load" --max-model-len 8192 \
            --no-enable-prefix-caching --peer "$folder/vllm.$1.json" --output "$results" --no-json
}

http() { # http TP: both servers, loaded in turn
    python3 -m tpdet serve "$model" --tp "$1" --load-format "$load" --max-model-len 8192 --drafts off \
        --gpu-memory-utilization 0.42 --served-model-name model --port $((port + 1)) \
        --run-dir "$folder/run.$1" >"$folder/ours.log" 2>&1 &
    servers+=($!)
    await $((port + 1)) $! "$folder/ours.log" || return 1
    "$vllm" -m vllm.entrypoints.cli.main serve "$model" --tensor-parallel-size "$1" --load-format "$load" \
        --max-model-len 8192 --gpu-memory-utilization 0.42 --served-model-name model --port "$port" \
        >"$folder/theirs.log" 2>&1 &
    servers+=($!)
    await "$port" $! "$folder/theirs.log" || return 1
    python3 -m tpdet bench peer --url "http://127.0.0.1:$((port + 1))" --peer-url "http://127.0.0.1:$port" \
        --tp "$1" --output "$results" --no-json
}

cd "$root"
for size in $2; do
    echo "== TP $size"
    offline "$size" || failed=1
    if [ -e "$model/tokenizer.json" ]; then
        http "$size" || failed=1
        stop
    fi
done
exit $failed
