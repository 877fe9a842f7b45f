#!/usr/bin/env bash
# Set up, prepare scikit-learn's handwritten digits as TFRecord shards, and train a small ViT on them; DALI decodes.
# Arguments go to train_dali.py: bash scripts/quickstart.sh --set NUM_EPOCHS=20 --output /tmp/short
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh

python=.venv/bin/python
[ -f data/digits/manifest.json ] || {
    "$python" scripts/write_digits.py data/digits_images
    "$python" scripts/prepare.py data/digits_images data/digits
}
exec "$python" imagenet_dali/train_dali.py --config quickstart "$@"
