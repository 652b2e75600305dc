#!/usr/bin/env bash
# Sets up the environment if need be, makes a small language model, trains it by RL against an int4-quantised sampler with
# policy_loss and with score_centering, walks the drift walk, and prints where the report is. Arguments go to `miles-sc train`.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
# spinning threads would take the cores from whoever has work
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

output=${MILES_SC_OUTPUT:-runs/quickstart}
# exact: all or nothing; the task's own verifier gives partial credit, which a policy can collect without spelling the word
task=(--task spell_backward --task-option max_word_len=5)
reward=(--rm-type exact)

if [ ! -f "$output/model/config.json" ]; then
  mkdir -p "$output"
  echo "1/4 a small model and its warm-up"
  miles-sc make-model "${task[@]}" "${reward[@]}" --output "$output/model" \
    --warm-up-steps 300
fi

echo "2/4 training: policy_loss, then score_centering"
miles-sc train --hf-checkpoint "$output/model" "${task[@]}" "${reward[@]}" --output-dir "$output/report/training" --overwrite \
  --compare policy_loss,score_centering --rollout-mismatch int4 \
  --rollout-top-logprobs-num 128 --use-rollout-logprobs --disable-grpo-std-normalization --calculate-per-token-loss \
  --num-rollout 40 --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 12 \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --lr 3e-4 --lr-warmup-iters 10 --adam-beta2 0.98 "$@"

echo "3/4 the drift walk: a constant reward, an unbiased and a noisy sampler"
python examples/drift_walk.py --quick --hf-checkpoint "$output/model" "${task[@]}" --output-dir "$output/report/drift"

echo "4/4 the report of it all"
miles-sc report "$output/report"
