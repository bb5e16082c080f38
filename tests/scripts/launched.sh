#!/bin/bash
# trains the network of launched.ipynb in two layers, from wherever it is called
set -euo pipefail
cd "$(dirname "$0")"
export WIDTH=${WIDTH:-512}
OUT="results of $(basename "$PWD")"
rm -rf "$OUT"
mkdir -p "$OUT"
LAYERS=(--layers 2)
if [ "$#" -gt 0 ]; then echo "with $*"; fi
python shell_trained.py \
    --width "$WIDTH" --out "$OUT" "${LAYERS[@]}" "$@" > log.txt 2>&1 | tee all.txt
