"""Arms of a comparison: short names for the losses that people compare, as overrides of one command line."""

import argparse
import re
from pathlib import Path

from miles_sc.trainer.run_directory import RunDirectory
from miles_sc.trainer.validation import validate_train_arguments

_ARM = re.compile(r"(?P<loss>policy_loss|tis|mis|score_centering(\+(?P<weight>tis|mis))?)(@(?P<k>\d+))?")
ARM_FORMS = "policy_loss, tis, mis, score_centering, score_centering+tis, score_centering+mis, each with @K to set the candidates"


def arm_arguments(args: argparse.Namespace, arm: str) -> argparse.Namespace:
    """The command line of one arm.

    ``policy_loss`` and its weighted forms take the trainer's own log-probs as the old policy, whatever
    ``--use-rollout-logprobs`` says of the centred arms: with the sampler's, every weight ``p_old / q`` would be 1.
    ``tis`` and ``mis`` are the policy loss with a truncated or masked weight (``--tis-clip``; the band of
    ``--score-centering-mis-*``), ``score_centering+tis`` the centred loss with the same weight.
    """
    match = _ARM.fullmatch(arm.strip())
    if not match:
        raise ValueError(f"--compare: {arm!r} is no arm; there are {ARM_FORMS}")
    overrides: dict[str, object] = {"loss_type": "policy_loss", "use_tis": False, "score_centering_is": "none"}
    if not match["loss"].startswith("score_centering"):
        overrides["use_rollout_logprobs"] = False
    if match["loss"].startswith("score_centering"):
        overrides.update(loss_type="score_centering", score_centering_is=match["weight"] or "none", score_centering_observe=False)
    elif match["loss"] == "tis":
        overrides.update(use_tis=True, tis_mode="truncate")
    elif match["loss"] == "mis":
        overrides.update(
            use_tis=True, tis_mode="mask", tis_clip_low=args.score_centering_mis_low, tis_clip=args.score_centering_mis_high
        )
    filtered = args.rollout_top_p < 1 or args.rollout_top_k > 0
    if overrides["loss_type"] == "policy_loss" and not (args.score_centering_observe or filtered):
        overrides["rollout_top_logprobs_num"] = 0  # nobody would read them
    if match["k"]:
        overrides["rollout_top_logprobs_num"] = int(match["k"])
    return argparse.Namespace(**{**vars(args), **overrides})


def planned_runs(args: argparse.Namespace) -> list[tuple[argparse.Namespace, RunDirectory, str]]:
    """Every run of a command: its own arguments, directory and title. Checked as a whole before the first one starts."""
    root = Path(args.output_dir)
    if not args.compare:
        name = args.loss_type
        return [(args, RunDirectory(root, args, arm=name), name)]
    if args.load or args.save or args.save_hf:
        raise ValueError("--compare with --load, --save or --save-hf: each arm keeps its own checkpoints; leave them out")
    runs = []
    arms = [arm.strip() for arm in args.compare.split(",")]
    for arm in arms:
        if arms.count(arm) > 1:
            raise ValueError(f"--compare {args.compare}: {arm} stands twice; name every arm once (--compare-seeds repeats arms)")
        for seed in range(args.rollout_seed, args.rollout_seed + args.compare_seeds):
            own = arm_arguments(args, arm)
            own.rollout_seed = seed
            path = root / f"{arm.replace('+', '-').replace('@', '-k')}-seed{seed}"
            own.output_dir = str(path)
            validate_train_arguments(own)
            runs.append((own, RunDirectory(path, own, arm=arm), f"{arm}, seed {seed}"))
    return runs
