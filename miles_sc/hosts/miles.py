"""Miles: where the plugin enters it. Known: the public repository's commit 31f1ca96 of August 2026 (docs/hosts.md)."""

from miles_sc.hosts.seams import Host, Seam, Wrappers

collection, engines, flags, loss, miles_session, miles_training, rollout_metrics, sample, train_data = (
    Wrappers(f"miles_sc.hosts.{name}")
    for name in (
        "collection", "engines", "flags", "loss", "miles_session", "miles_training", "rollout_metrics", "sample", "train_data",
    )
)  # fmt: skip

_ARGUMENTS = "miles.utils.arguments"
_CONVERSION = "miles.ray.rollout.train_data_conversion"
_ENDPOINT = "miles.rollout.generate_utils.generate_endpoint_utils"
_LEGACY = "miles.rollout.sglang_rollout"
_SESSION = "miles.rollout.session"
_TRAINING = "miles.backends.training_utils"
_NO_CANDIDATES = "samples lose the candidates, and training refuses them"

_COMMAND_LINE = (
    Seam(
        _ARGUMENTS, "get_miles_extra_args_provider", "the flags are unknown", parameters=("add_custom_arguments",),
        rests_on=("--loss-type", "choices", "add_argument", "parse_known_args"), wrap=flags.add_flags,
    ),
    Seam(
        _ARGUMENTS, "miles_validate_args", "an illegal configuration starts", parameters=("args",),
        rests_on=("custom_config_path", "setattr"), wrap=flags.validate,
    ),
)  # fmt: skip

_START = (
    Seam(
        "miles.utils.dumper_utils", "get_sglang_env", "engines may report log-probs without the temperature",
        parameters=("args",), wrap=engines.engine_environment,
    ),
    Seam(
        "miles.ray.rollout.server_group", "dumper_utils", "engines may report log-probs without the temperature",
        within="ServerGroup", rests_on=("env_vars", "update", "get_sglang_env", "runtime_env"),
    ),
    Seam(
        "miles.ray.rollout.router_manager", "start_session_server", "a route that degrades is found out while training",
        parameters=("args",), rests_on=("sglang_router_ip", "sglang_router_port"), wrap=engines.engines_started,
    ),
    Seam(
        "miles.ray.rollout.rollout_manager", "start_session_server", "a route that degrades is found out while training",
        within="RolloutManager", rests_on=("start_rollout_servers", "start_session_server"),
    ),
    Seam(
        "miles.ray.placement_group", "create_rollout_manager", "a node without the plugin is found out while training",
        parameters=("args", "pg"), wrap=engines.nodes_ready,
    ),
)  # fmt: skip

_SAMPLE = (
    Seam("miles.utils.types", "Sample", _NO_CANDIDATES, rests_on=("dataclass",), replace=sample.with_recorded_fields),
    Seam("miles.utils.types", "Sample.validate", "misaligned rows pass", parameters=("self",), wrap=sample.validate),
    Seam(
        "miles.utils.types", "Sample.strip_last_output_tokens", "rows no longer match tokens", parameters=("self", "n"),
        rests_on=("response_length",), wrap=sample.strip_last_output_tokens,
    ),
    Seam(
        "miles.utils.types", "Sample.reset_for_retry", "a retried sample keeps rows of its first attempt",
        parameters=("self",), wrap=sample.reset_for_retry,
    ),
    Seam("miles.utils.types", "Sample.from_dict", _NO_CANDIDATES, parameters=("data",), rests_on=("setattr",)),
    Seam("miles.utils.types", "Sample.to_dict", _NO_CANDIDATES, parameters=("self",), rests_on=("__dict__",)),
    Seam(
        "miles.rollout.generate_utils.tool_call_utils", "update_sample_with_tool_responses", "rows no longer match tokens",
        parameters=("sample",), rests_on=("tokens", "response_length", "loss_mask"), wrap=sample.tool_responses,
    ),
    Seam(
        "miles.rollout.generate_utils.sample_utils", "_merge_sample_pair", _NO_CANDIDATES, parameters=("a", "b", "tokenizer"),
        rests_on=("_create_with_all_fields", "obs_len", "response_length"), wrap=sample.merge_pair,
    ),
)  # fmt: skip

_GENERATION = (
    Seam(
        "miles.rollout.inference_rollout.inference_rollout_common", "generate_and_rm", "evaluation is asked for candidates",
        parameters=("state", "sample", "sampling_params", "evaluation"), awaited=True, rests_on=("evaluation",),
        wrap=collection.generate_and_reward,
    ),
    Seam(
        _LEGACY, "generate_and_rm", "evaluation is asked for candidates",
        parameters=("args", "sample", "sampling_params", "evaluation"), awaited=True, rests_on=("evaluation",),
        wrap=collection.generate_and_reward,
    ),
    Seam(
        _ENDPOINT, "compute_request_payload", "no candidates are asked for",
        parameters=("args", "input_ids", "sampling_params"), rests_on=("return_logprob", "sampling_params", "input_ids"),
        wrap=collection.request_payload,
    ),
    Seam(
        _ENDPOINT, "update_sample_from_response", _NO_CANDIDATES,
        parameters=("args", "sample", "payload", "output"), awaited=True,
        rests_on=("output_token_logprobs", "tokens", "response_length", "rollout_log_probs", "meta_info"),
        wrap=collection.sample_update,
    ),
    Seam(
        _LEGACY, "generate", _NO_CANDIDATES, parameters=("args", "sample", "sampling_params"), awaited=True,
        rests_on=("post", "url", "payload", "output_token_logprobs", "rollout_log_probs"), wrap=collection.whole_generate,
    ),
    Seam(
        "miles.utils.http_utils", "post", "no candidates are asked for", parameters=("url", "payload"), awaited=True,
    ),
    Seam(
        _LEGACY, "post", "no candidates are asked for", within="generate",
        rests_on=("post", "url", "payload", "sampling_params", "return_logprob"), wrap=collection.generate_post,
    ),
)  # fmt: skip

_SESSIONS = (
    Seam(
        "miles.rollout.generate_utils.openai_endpoint_utils", "post", "evaluation is asked for candidates",
        within="OpenAIEndpointTracer.create", rests_on=("post",), wrap=miles_session.opening_post,
    ),
    Seam(
        f"{_SESSION}.sessions", "setup_session_routes", "evaluation is asked for candidates",
        parameters=("app", "backend", "args"), rests_on=("/sessions", "create_session"), wrap=miles_session.session_routes,
    ),
    *(
        Seam(
            f"{_SESSION}.{module}", f"{registry}.create_session", "evaluation is asked for candidates", parameters=("self",),
            rests_on=("sessions", "session_id"), wrap=miles_session.create_session,
        )
        for module, registry in (("linear_trajectory", "SessionRegistry"), ("v2.session_state", "SessionRegistryV2"))
    ),
    *(
        Seam(
            f"{_SESSION}.{module}", f"{core}.chat_completions", "evaluation is asked for candidates",
            parameters=("self", "session_id"), awaited=True,
            rests_on=("prepare_chat_request", "registry", "_chat_client_response", "append_record" if core == "SessionCore"
                      else "commit_generation"),
            wrap=miles_session.chat_completions,
        )
        for module, core in (("core", "SessionCore"), ("v2.core", "SessionCoreV2"))
    ),
    Seam(
        f"{_SESSION}.core", "prepare_chat_request", "no candidates are asked for", parameters=("body", "args", "tito_tokenizer"),
        rests_on=("logprobs", "return_meta_info", "MessageValidationError"), wrap=miles_session.prepare_chat_request,
    ),
    Seam(
        f"{_SESSION}.core", "_strip_replay_payloads", "an agent is sent candidates that it did not ask for",
        parameters=("response",), rests_on=("choices", "meta_info"), wrap=miles_session.client_response,
    ),
    Seam(
        f"{_SESSION}.core", "_chat_client_response", "an agent is sent candidates that it did not ask for",
        rests_on=("_strip_replay_payloads",),
    ),
    Seam(
        f"{_SESSION}.samples.merge", "_compute_sample_from_openai_record", _NO_CANDIDATES,
        parameters=("args", "record", "tokenizer", "trim_count"), rests_on=("strip_last_output_tokens", "meta_info"),
        wrap=miles_session.sample_of_record,
    ),
    Seam(
        f"{_SESSION}.samples.codec", "SAMPLES_VALUE_SPEC_V2", _NO_CANDIDATES, within="ValueSpec",
        rests_on=("codec", "dtype", "strict"), replace=miles_session.wire_fields,
    ),
    Seam(f"{_SESSION}.samples.codec", "_TENSOR_FIELDS", _NO_CANDIDATES, replace=miles_session.wire_tensors),
    Seam(
        f"{_SESSION}.samples.codec", "encode_samples", _NO_CANDIDATES, parameters=("samples", "session_metadata"),
        rests_on=("fields", "SAMPLES_VALUE_SPEC_V2", "nulls"), wrap=miles_session.encode_samples,
    ),
    Seam(
        f"{_SESSION}.samples.codec", "decode_samples_and_merge_input_sample", _NO_CANDIDATES,
        parameters=("payload", "input_sample"), rests_on=("fields", "SAMPLES_VALUE_SPEC_V2", "_TENSOR_FIELDS"),
        wrap=miles_session.decode_samples,
    ),
)  # fmt: skip

_TRAIN_DATA = (
    Seam(
        _CONVERSION, "convert_samples_to_train_data", "samples without candidates are trained on",
        parameters=("args", "samples"), rests_on=("tokens", "loss_mask", "rollout_log_probs"),
        wrap=train_data.convert_samples, guards=True,
    ),
    Seam(
        _CONVERSION, "_package_shards", _NO_CANDIDATES, parameters=("args", "data", "partitions"),
        rests_on=("partitions", "rollout_log_probs", "shards"), wrap=train_data.package_shards,
    ),
    Seam(_CONVERSION, "ROLLOUT_DATA_VALUE_SPEC", "a store other than Ray's refuses the shards", replace=train_data.value_specs),
    Seam(
        f"{_TRAINING}.data", "get_rollout_data", "a run without candidates is found out by its loss",
        parameters=("args", "rollout_data_ref"), rests_on=("process_rollout_data", "rollout_log_probs"),
        wrap=train_data.rollout_data, guards=True,
    ),
    Seam(
        f"{_TRAINING}.data", "get_batch", "the loss gets no candidates", parameters=("data_iterator", "keys"),
        rests_on=("get_next", "unconcat_tokens", "loss_masks"), wrap=train_data.batch_keys,
    ),
    Seam(f"{_TRAINING}.data", "DataIterator.get_next", "the loss gets no candidates", parameters=("self", "keys"),
         rests_on=("rollout_data", "micro_batch_indices")),
    Seam(
        "miles.ray.rollout.metrics", "_compute_metrics_from_samples", "the recorded heads are not logged",
        parameters=("args", "samples"), wrap=rollout_metrics.rollout_metrics,
    ),
    Seam(
        f"{_TRAINING}.log_utils", "log_rollout_data", "logging stops the run", parameters=("rollout_id", "args", "rollout_data"),
        rests_on=("flat", "isinstance"),
    ),
)  # fmt: skip

_LOSS = (
    Seam(
        f"{_TRAINING}.loss_hub.losses", "get_loss_function", "the loss is unknown", parameters=("args",),
        rests_on=("loss_type", "policy_loss"), wrap=miles_training.dispatch, guards=True,
    ),
    Seam(
        f"{_TRAINING}.loss", "loss_function", "the loss is scaled in a way that we do not know",
        parameters=("args", "batch", "num_microbatches", "logits"),
        rests_on=("get_loss_function", "sum_of_sample_mean", "recompute_loss_function", "rollout_mask_sums"),
    ),
    Seam(
        f"{_TRAINING}.log_utils", "aggregate_train_losses", "worst cases are not logged", parameters=("losses_reduced",),
        rests_on=("keys", "values"), wrap=miles_training.step_metrics,
    ),
    Seam(
        f"{_TRAINING}.parallel", "ParallelState", "the loss does not know its groups",
        rests_on=("tp", "cp", "intra_dp_cp"),
    ),
    Seam(
        "miles.backends.megatron_utils.model", "get_forward_backward_func", "a broken token is trained on",
        within="train_one_step", rests_on=("get_forward_backward_func", "forward_backward_func", "optimizer"),
        wrap=loss.forward_backward,
    ),
    Seam(
        "miles.backends.megatron_utils.model", "train_one_step", "the loss gets no candidates",
        rests_on=("get_batch", "loss_function", "advantages", "aggregate_train_losses"),
    ),
    Seam(
        "miles.backends.fsdp_utils.actor", "FSDPTrainRayActor._train_core", "a broken token is trained on",
        parameters=("self", "rollout_id", "rollout_data"), rests_on=("optimizer", "step", "advantages", "get_batch"),
        wrap=miles_training.train_core,
    ),
)  # fmt: skip


def _takeover(losses: str, metrics: str) -> tuple[Seam, ...]:
    """A later Miles, which collects the candidates itself under the names of ours: its loss is exchanged, nothing else."""
    return (
        Seam(
            _ARGUMENTS, "get_miles_extra_args_provider", "the flag is unknown", parameters=("add_custom_arguments",),
            rests_on=("add_argument",), wrap=flags.add_provider_flag,
        ),
        Seam(
            _ARGUMENTS, "miles_validate_args", "an illegal configuration starts", parameters=("args",),
            wrap=flags.check_takeover,
        ),
        Seam(
            f"{_TRAINING}.{losses}", "get_loss_function", "the loss is the host's", parameters=("args",),
            rests_on=("loss_type", "score_centering"), wrap=miles_training.dispatch,
        ),
        Seam(
            f"{_TRAINING}.{metrics}", "aggregate_train_losses", "worst cases are not logged", parameters=("losses_reduced",),
            rests_on=("keys", "values"), wrap=miles_training.step_metrics,
        ),
        Seam(f"{_TRAINING}.parallel", "ParallelState", "the loss does not know its groups", rests_on=("tp", "cp", "intra_dp_cp")),
    )  # fmt: skip


HOST = Host(
    package="miles",
    entry=_ARGUMENTS,
    seams=(*_COMMAND_LINE, *_START, *_SAMPLE, *_GENERATION, *_SESSIONS, *_TRAIN_DATA, *_LOSS),
    own_loss="score_centering",
    takeover=(_takeover("loss.hub.losses", "metrics.log_utils"), _takeover("loss_hub.losses", "log_utils")),
)
