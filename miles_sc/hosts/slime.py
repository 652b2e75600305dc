"""Slime: where the plugin enters it. Known: the public repository's commit 624b824a8 of August 2026 (docs/hosts.md)."""

from miles_sc.hosts.seams import Host, Seam, Wrappers

collection, engines, flags, loss, rollout_metrics, sample, slime_rollout, slime_training, train_data = (
    Wrappers(f"miles_sc.hosts.{name}")
    for name in (
        "collection", "engines", "flags", "loss", "rollout_metrics", "sample", "slime_rollout", "slime_training", "train_data",
    )
)  # fmt: skip

_ARGUMENTS = "slime.utils.arguments"
_GENERATE = "slime.rollout.sglang_rollout"
_MANAGER = "slime.ray.rollout"
_MEGATRON = "slime.backends.megatron_utils"
_METRICS = "slime.observability.train_metric_utils"
_SAMPLE = "slime.utils.types"
_SHARDS = "slime.observability.rollout_data_utils"
_NO_CANDIDATES = "samples lose the candidates, and training refuses them"

_COMMAND_LINE = (
    Seam(
        _ARGUMENTS, "get_slime_extra_args_provider", "the flags are unknown", parameters=("add_custom_arguments",),
        rests_on=("--loss-type", "choices", "add_argument", "custom_loss"), wrap=flags.add_flags,
    ),
    Seam(
        _ARGUMENTS, "slime_validate_args", "an illegal configuration starts", parameters=("args",),
        rests_on=("custom_config_path", "setattr"), wrap=slime_rollout.validate,
    ),
    Seam(
        _ARGUMENTS, "parse_megatron_role_args", "an illegal configuration starts",
        parameters=("base_args", "megatron_config_path", "role"), rests_on=("actor", "overrides"),
        wrap=slime_rollout.role_arguments,
    ),
    Seam(
        _ARGUMENTS, "parse_args", "an illegal configuration starts",
        rests_on=("get_slime_extra_args_provider", "slime_validate_args", "sglang_parse_args"),
    ),
)  # fmt: skip

_START = (
    Seam(
        "slime.backends.sglang_utils.sglang_engine", "SGLangEngine.init",
        "engines may report log-probs without the temperature", parameters=("self",),
        rests_on=("args", "_init_normal", "_init_external"), wrap=slime_rollout.start_engine,
    ),
    Seam(
        "slime.backends.sglang_utils.sglang_engine", "SGLangEngine._init_normal",
        "engines may report log-probs without the temperature", rests_on=("launch_server_process",),
    ),
    Seam(
        "slime.ray.placement_group", "create_rollout_manager", "a node without the plugin is found out while training",
        parameters=("args", "pg"), rests_on=("RolloutManager", "remote"), wrap=engines.nodes_ready,
    ),
)  # fmt: skip

_GENERATION = (
    Seam(_SAMPLE, "Sample", _NO_CANDIDATES, rests_on=("dataclass",), replace=sample.with_recorded_fields),
    Seam(
        _SAMPLE, "Sample.append_response_tokens", _NO_CANDIDATES,
        parameters=("self", "args", "tokens", "log_probs", "trainable", "meta_info"),
        rests_on=("tokens", "response_length", "loss_mask", "rollout_log_probs"), wrap=slime_rollout.append_response_tokens,
    ),
    Seam(_SAMPLE, "Sample.from_dict", _NO_CANDIDATES, parameters=("data",), rests_on=("setattr",)),
    Seam(_SAMPLE, "Sample.to_dict", _NO_CANDIDATES, parameters=("self",), rests_on=("__dict__",)),
    Seam(
        _GENERATE, "generate_and_rm", "evaluation is asked for candidates",
        parameters=("args", "sample", "sampling_params", "evaluation"), awaited=True, rests_on=("evaluation", "generate"),
        wrap=collection.generate_and_reward,
    ),
    Seam(
        _GENERATE, "generate", "no candidates are asked for", parameters=("args", "sample", "sampling_params"), awaited=True,
        rests_on=("post", "append_response_tokens", "meta_info"), wrap=slime_rollout.generate,
    ),
    Seam(
        "slime.utils.http_utils", "post", "no candidates are asked for", parameters=("url", "payload"), awaited=True,
    ),
    Seam(
        _GENERATE, "post", "no candidates are asked for", within="generate",
        rests_on=("post", "url", "payload", "sampling_params", "return_logprob"), wrap=slime_rollout.post,
    ),
    Seam(
        "slime.rollout.sglang_streaming_rollout", "generate_streaming", "a stream that we refuse has another name",
        rests_on=("stream", "append_response_tokens"),
    ),
)  # fmt: skip

_TRAIN_DATA = (
    Seam(
        _MANAGER, "RolloutManager", _NO_CANDIDATES, rests_on=("rollout_engines",), replace=slime_rollout.recording_manager,
    ),
    Seam(
        _MANAGER, "RolloutManager.__init__", "a route that degrades is found out while training",
        parameters=("self", "args", "pg"), rests_on=("start_rollout_servers", "rollout_init_handles"),
    ),
    Seam(
        _MANAGER, "RolloutManager._convert_samples_to_train_data", "samples without candidates are trained on",
        parameters=("self", "samples"), rests_on=("tokens", "loss_mask", "rollout_log_probs", "remove_sample"),
    ),
    Seam(
        _MANAGER, "RolloutManager._split_train_data_by_dp", _NO_CANDIDATES, parameters=("self", "data"),
        rests_on=("partition", "tensorize_rollout_data_for_training", "sample_indices", "put"),
    ),
    Seam(
        _MANAGER, "RolloutManager.generate", _NO_CANDIDATES, parameters=("self", "rollout_id"),
        rests_on=("_convert_samples_to_train_data", "_split_train_data_by_dp"),
    ),
    Seam(
        _SHARDS, "tensorize_rollout_data_for_training", _NO_CANDIDATES, parameters=("rollout_data",),
        wrap=slime_rollout.shard,
    ),
    Seam(
        "slime.utils.data", "process_rollout_data", "a run without candidates is found out by its loss",
        parameters=("args", "rollout_data_ref"), rests_on=("partition", "total_lengths"),
        wrap=train_data.rollout_data, guards=True,
    ),
    Seam(
        f"{_MEGATRON}.data", "get_batch", "the loss gets no candidates", parameters=("data_iterator", "keys"),
        rests_on=("get_next", "unconcat_tokens", "loss_masks", "thd"), wrap=train_data.batch_keys,
    ),
    Seam(
        f"{_MEGATRON}.data", "DataIterator.get_next", "the loss gets no candidates", parameters=("self", "keys"),
        rests_on=("rollout_data", "micro_batch_indices"),
    ),
    Seam(
        "slime.observability.rollout_metrics", "compute_metrics_from_samples", "the recorded heads are not logged",
        parameters=("args", "samples"), wrap=rollout_metrics.rollout_metrics,
    ),
    Seam(
        _METRICS, "log_rollout_data", "logging stops the run", parameters=("rollout_id", "args", "rollout_data"),
        rests_on=("ignored_keys",), wrap=slime_training.logged_data,
    ),
)  # fmt: skip

_LOSS = (
    Seam(
        f"{_MEGATRON}.loss", "loss_function", "the loss is unknown",
        parameters=("args", "batch", "num_microbatches", "step_global_batch_size", "logits"),
        rests_on=(
            "loss_type", "custom_loss", "load_function", "custom_loss_function_path", "recompute_loss_function",
            "calculate_per_token_loss", "rollout_mask_sums",
        ),
        wrap=slime_training.loss_function, guards=True,
    ),
    Seam(
        f"{_MEGATRON}.cp_utils", "get_logits_and_tokens_offset_with_cp", "rows are taken from the wrong logits",
        parameters=("total_length", "response_length"), rests_on=("chunk_size", "prompt_length"),
    ),
    Seam(
        _METRICS, "reduce_train_step_metrics", "worst cases are not logged", parameters=("losses_reduced",),
        rests_on=("keys", "values", "dp_with_cp_group"), wrap=slime_training.step_metrics,
    ),
    Seam(
        f"{_MEGATRON}.model", "get_forward_backward_func", "a broken token is trained on", within="train_one_step",
        rests_on=("get_forward_backward_func", "forward_backward_func", "optimizer"), wrap=loss.forward_backward,
    ),
    Seam(
        f"{_MEGATRON}.model", "train_one_step", "the loss gets no candidates",
        rests_on=("get_batch", "loss_function", "advantages", "reduce_train_step_metrics"),
    ),
    Seam(
        f"{_MEGATRON}.actor", "MegatronTrainRayActor._get_rollout_data", "a run without candidates is found out by its loss",
        rests_on=("process_rollout_data", "rollout_log_probs", "slice_log_prob_with_cp"),
    ),
)  # fmt: skip

HOST = Host(
    package="slime",
    entry=_ARGUMENTS,
    seams=(*_COMMAND_LINE, *_START, *_GENERATION, *_TRAIN_DATA, *_LOSS),
    own_loss="score_centering",
)
