"""The command line: a provider that parses inside itself, and a validation that ends with a file's overrides."""

import argparse
import json


def get_extra_args_provider(add_custom_arguments=None):
    def add_arguments(parser):
        if add_custom_arguments is not None:
            parser = add_custom_arguments(parser)
        parser.add_argument("--loss-type", type=str, choices=["policy_loss", "sft_loss"], default="policy_loss")
        parser.add_argument("--batch-size", type=int, default=8)
        parser.add_argument("--custom-config-path", default=None)
        parser.add_argument("--users-flag", default=None)
        parser.add_argument("--hf-checkpoint", default=None)
        parser.add_argument("--rollout-temperature", type=float, default=1.0)
        parser.add_argument("--rollout-top-p", type=float, default=1.0)
        parser.add_argument("--rollout-top-k", type=int, default=-1)
        try:
            known, _ = parser.parse_known_args()
        except SystemExit:
            return parser
        if known.users_flag is not None:
            parser.add_argument(f"--{known.users_flag}", default="unset")
        return parser

    return add_arguments


def validate_args(args):
    if args.batch_size < 1:
        raise ValueError("batch size")
    if args.custom_config_path is not None:
        with open(args.custom_config_path) as file:
            for name, value in json.load(file).items():
                setattr(args, name, value)


def parse_args():
    parser = get_extra_args_provider()(argparse.ArgumentParser())
    args = parser.parse_args()
    validate_args(args)
    return args
