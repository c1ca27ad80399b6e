"""What vLLM's and nano-vllm's scripts may say and this engine does not have: taken at the values that change nothing.

A script that sets such an option to what this engine does anyway runs as it is. At any other value, and for any other
name, checks/values.py raises its one error. examples/move_to_vllm.md says what to write instead.
"""

from ast import literal_eval
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any

from nanovllm.checks.values import check_number, check_switch

ANY = object()  # stands for every value: such options say how fast, how loud or where, and never what
ANYTHING = {"any": [ANY], "any list": [ANY, []]}  # the latter may have several values as a flag, too
Table = dict[str, list[Any]]  # name -> the values that change nothing; None is always one of them

# What they are given to -> "values: names; values: names; ...". Of vLLM 0.32, and `hf_config` and `eos` of nano-vllm.
TEXTS = {
    "LLM": """
any: swap_space max_parallel_loading_workers max_seq_len_to_capture distributed_executor_backend optimization_level
    served_model_name max_logprobs mm_processor_cache_gb kv_offloading_size max_cpu_loras
    safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size pt_load_map_location
    max_cudagraph_capture_size ir_op_priority kernel_config moe_backend linear_backend
    sparse_indexer_topk_backend all2all_backend gdn_prefill_backend kda_prefill_backend kda_decode_backend
    mamba_backend mamba_ssu_algorithm mamba_config mamba_block_size mamba_cache_mode replayssm_buffer_len
    performance_mode renderer_num_workers distributed_timeout_seconds cpu_distributed_timeout_seconds
    dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_backend
    dbo_decode_token_threshold dbo_prefill_token_threshold ubatch_size dp_sync_interval expert_placement_strategy
    eplb_config fault_tolerance_config ec_manager_config kv_offloading_backend offload_backend offload_num_in_group
    offload_prefetch_step master_addr master_port mm_processor_cache_type mm_hasher_algorithm
    mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin mm_tensor_ipc
    mm_processor_device mm_ipc_gpu_memory_gb video_pruning_rate video_pruning_method custom_histogram_buckets
    jit_monitor_mode per_request_spec_decode_metrics show_hidden_metrics_for_version logging_config log_level
    log_config_file shutdown_timeout prefill_schedule_interval prefix_match_unit;
any list: ignore_patterns cudagraph_capture_sizes numa_bind_nodes numa_bind_cpus;
False, True: disable_log_stats use_tqdm_on_load disable_custom_all_reduce disable_cascade_attn
    disable_mm_preprocessor_cache trust_remote_code enable_chunked_prefill async_scheduling enable_expert_parallel
    aggregate_engine_logging enable_shm_tensor_arena allow_deprecated_quantization jit_monitor_verbose
    scheduler_reserve_full_isl disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization cudagraph_metrics
    enable_mfu_metrics enable_logging_iteration_details numa_bind enable_mm_processor_stats fail_on_environ_validation
    fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras
    disable_chunked_mm_input language_model_only mm_device_do_normalize interleave_mm_strings swa_bounded_replay
    enable_flashinfer_autotune enable_batch_sharded_sampling enable_ep_weight_filter use_fp64_gumbel dcp_q_replicate
    enable_cumem_allocator enable_nccl_comm_suspend sleep_mode_offload_cudagraph long_prefill_token_threshold_adaptive
    enable_mamba_shared_prefix_checkpoint use_replayssm enable_log_requests;
False: skip_tokenizer_init skip_mm_profiling enable_prompt_embeds enable_mm_embeds mm_encoder_only
    data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb enable_elastic_ep
    enable_eplb enable_dbo enable_hc_sp enable_fault_tolerance enable_layerwise_nvtx_tracing ray_workers_use_nsight
    calculate_kv_scales disable_sliding_window enable_sleep_mode kv_sharing_fast_prefill
    enable_mamba_cache_stochastic_rounding enable_return_routed_experts return_sampling_mask enable_trace_replay
    enable_tower_connector_lora tokens_only;
None: override_pooler_config default_mm_loras io_processor_plugin ec_transfer_config data_parallel_rank
    data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
    elastic_ep_max_dp_size kv_transfer_config spec_method spec_model spec_tokens attention_backend attention_config
    download_dir chat_template device_ids max_num_queued_reqs max_num_queued_tokens max_num_active_seqs
    max_num_scheduled_tokens hf_config_path scheduler_cls reasoning_config code_revision tokenizer_revision hf_token
    quantization_config aux_output_config weight_transfer_config lora_target_modules max_lora_cls_labels
    watermark_config diffusion_config engram_config otlp_traces_endpoint collect_detailed_traces hf_config;
1: max_num_partial_prefills max_long_partial_prefills stream_interval pipeline_parallel_size data_parallel_size
    decode_context_parallel_size prefill_context_parallel_size nnodes;
0: node_rank cpu_offload_gb offload_group_size prefix_cache_retention_interval mamba_cache_philox_rounds;
"": reasoning_parser_plugin reasoning_parser worker_extension_cls model_weights;
[]: sleep_preserve_parameter_names cpu_offload_params offload_params kv_cache_dtype_skip_layers;
{}: media_io_kwargs override_generation_config model_class_overrides additional_config model_loader_extra_config;
"auto", "hf", "slow": tokenizer_mode; "auto", "generate": task; 0, {}: compilation_config; "auto", "hf": config_format;
"auto", "vllm": model_impl; "auto": lora_dtype worker_cls mamba_cache_dtype mamba_ssm_cache_dtype;
"raw_logprobs": logprobs_mode; {}, {"backend": "auto"}, {"backend": "guidance"}: structured_outputs_config;
0.0: watermark; -1: eos
""",
    "nanovllm serve": """
any: uvicorn_log_level disable_access_log_for_endpoints max_log_len h11_max_incomplete_event_size h11_max_header_count
    cohere_format anthropic_disabled_thinking_effort data_parallel_supervisor_port dp_supervisor_probe_interval_s
    dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold;
False, True: enable_log_deltas log_error_stack enable_prompt_tokens_details enable_server_load_tracking
    enable_request_id_headers disable_fastapi_docs enable_flash_late_interaction cohere_is_reasoning_model
    enable_auto_tool_choice;
False: enable_per_request_metrics enable_ssl_refresh allow_credentials trust_request_mm_kwargs enable_scale_out
    enable_log_outputs headless grpc enable_offline_docs trust_request_chat_template;
None: ssl_keyfile ssl_certfile ssl_ca_certs ssl_ciphers uds config grpc_port tool_server fingerprint_value;
1: api_server_count; 0: ssl_cert_reqs sse_keep_alive_interval; "": root_path tool_parser_plugin; []: middleware;
["*"]: allowed_methods allowed_headers; "assistant": response_role; "auto": tool_strict_level;
"full", "hash", "none": fingerprint_mode
""",
    "nanovllm run-batch": """
any: output_tmp_dir max_inflight host port url max_log_len;
False, True: enable_prompt_tokens_details enable_server_load_tracking enable_force_include_usage disable_log_requests
    enable_log_deltas log_error_stack enable_auto_tool_choice enable_tokenizer_info_endpoint;
False: enable_metrics enable_log_outputs trust_request_chat_template return_tokens_as_token_ids
    exclude_tools_when_tool_choice_none;
None: tool_server; "": tool_parser_plugin; "assistant": response_role; "auto": chat_template_content_format;
{}: default_chat_template_kwargs; 20: max_logprobs
""",
    "SamplingParams": """
any: skip_clone; False: use_beam_search early_stopping flat_logprobs skip_reading_prefix_cache watermarking;
None: thinking_token_budget prompt_logprob_token_ids prompt_logprob_start truncate_prompt_tokens repetition_detection
    trace_decode_token_ids; 1: best_of stream_interval; 0: routed_experts_prompt_start; 1.0: length_penalty
""",
    "body": """
any: user metadata service_tier safety_identifier prompt_cache_key parallel_tool_calls store verbosity
    prompt_cache_retention prompt_cache_options request_id session_id truncation_side return_mm_kwargs
    include_reasoning guided_decoding_backend; False: stream return_prompt_text return_token_offsets;
None: audio prediction mm_payload guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern
    web_search_options moderation; "": suffix; []: logits_processors prompt_embeds documents functions;
{}: stream_options media_io_kwargs mm_processor_kwargs multi_modal_data kv_transfer_params ec_transfer_params
    vllm_xargs; "none": reasoning_effort; ["text"]: modalities; True: detokenize; "none", "auto": function_call
""",
    "generate": """
{}: mm_processor_kwargs tokenization_kwargs
""",
    "add_request": """
any: arrival_time; None: trace_headers prompt_text
""",
    "AsyncLLM.generate": """
any: session_id; None: prompt_text data_parallel_rank kv_hints trace_headers reasoning_ended;
{}: reasoning_parser_kwargs
""",
    "AsyncLLM.encode": """
None: trace_headers data_parallel_rank reasoning_ended
""",
    "StructuredOutputsParams": """
None: whitespace_pattern
""",
    "BeamSearchParams": """
any: include_stop_str_in_output; False: watermarking; None: structured_outputs
""",
    "PoolingParams": """
any: requires_token_ids; False: skip_reading_prefix_cache;
None: normalize softmax activation step_tag_id returned_token_ids late_interaction_params; {}: extra_kwargs;
2: output_kind
""",
    "PoolerConfig": """
any: enable_flash_late_interaction; False: enable_chunked_processing;
None: normalize softmax activation max_embed_len logit_mean logit_sigma step_tag_id returned_token_ids;
"ALL": tok_pooling_type
""",
    "SpeculativeConfig": """
any: disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction draft_sample_method;
False: use_heterogeneous_vocab parallel_drafting;
None: num_speculative_tokens_per_batch_size enforce_eager attention_backend moe_backend kv_cache_dtype code_revision;
1: draft_tensor_parallel_size tensor_parallel_size; "standard": rejection_sample_method
""",
    "LoRARequest": """
any: base_model_name; False: is_3d_lora_weight; None: tensorizer_config_dict
""",
    "ProfilerConfig": """
any: torch_profiler_with_memory torch_profiler_with_flops torch_profiler_with_stack torch_profiler_use_gzip
    torch_profiler_record_shapes torch_profiler_dump_cuda_time_total ignore_frontend;
0: delay_iterations max_iterations
""",
    "KVEventsConfig": """
any: endpoint replay_endpoint buffer_steps hwm max_queue_size topic
""",
    "tokenization_kwargs": """
False: truncation do_lower_case; None: max_length pad_prompt_tokens; False, "do_not_pad": padding
""",
    "a prompt": """
None: prompt_embeds encoder_prompt decoder_prompt token_type_ids;
{}: multi_modal_data mm_processor_kwargs multi_modal_uuids
""",
    "get_tokenizer": """
None: revision
""",
    "AsyncLLM.from_engine_args": """
any: usage_context client_addresses client_count client_index; False, True: start_engine_loop; []: stat_loggers
""",
    "LLMEngine.from_engine_args": """
False, True: enable_multiprocessing
""",
    "body of a response": """
any: max_tool_calls; "auto", "disabled": truncation;
False: enable_response_messages echo return_token_ids return_tokens_as_token_ids continue_final_message;
None: conversation prompt prompt_logprobs image previous_response access_programs; 1: n;
[]: logprob_token_ids context_management previous_input_messages; {}: background_options; True: add_generation_prompt
""",
    "body of an embedding": """
any: user; None: normalize softmax activation; []: messages; {}: multi_modal_data mm_processor_kwargs media_io_kwargs;
"do_not_pad": padding; "float32": embed_dtype; "native", "little": endianness
""",
}
ALSO = {  # what takes all names of another, too
    "chat": "generate",
    "enqueue": "generate",
    "add_request": "generate",
    "get_tokenizer": "LLM",
    **dict.fromkeys(("nanovllm serve", "nanovllm run-batch"), "LLM"),
    "body": "SamplingParams",
    "AsyncLLM.generate": "generate",
    "LLMEngine.from_engine_args": "AsyncLLM.from_engine_args",
}


def _table_of(text: str) -> Table:
    table: Table = {}
    for group in text.split(";"):
        values, _, names = group.strip().rpartition(": ")
        neutral = ANYTHING.get(values) or literal_eval(f"[{values}]")
        table |= dict.fromkeys(names.split(), neutral)
    return table


NEUTRAL: dict[str, Table] = {what: _table_of(text) for what, text in TEXTS.items()}
NEUTRAL |= {what: NEUTRAL[other] | NEUTRAL.get(what, {}) for what, other in ALSO.items()}


def _bytes_of_gib(size: Any) -> int:
    return int(check_number("kv_offloading_size", size, Real, 0, 1 << 20) * (1 << 30))


RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {  # another name of an option -> ours, its value there
    "kv_offloading_size": ("cpu_cache_bytes", _bytes_of_gib),
    "kvcache_block_size": ("block_size", lambda size: size),  # this and the next one: nano-vllm's
    "num_kvcache_blocks": ("num_gpu_blocks_override", lambda number: None if number == -1 else number),
}


def in_our_words(given: Mapping[str, Any], known: Collection[str], what: str) -> dict[str, Any]:
    """`given` without what changes nothing here, and under our names where vLLM or nano-vllm has others for the same.

    What is left may hold names that are not `known`. ValueError where two names of one option say different things.
    """
    ours = dict(given)
    for name, (our_name, converted) in RENAMED.items():
        if our_name not in known or (value := ours.pop(name, None)) is None:
            continue
        value = converted(value)
        if ours.get(our_name) is None:
            ours[our_name] = value
        elif ours[our_name] != value:
            raise ValueError(f"{name} and {our_name} are two names of one option; leave one of them out")
    is_only = ours.pop("language_model_only", None) if "limit_mm_per_prompt" in known else None
    if is_only is not None and check_switch("language_model_only", is_only):
        ours["limit_mm_per_prompt"] = {"image": 0}
    neutral = {name: values for name, values in NEUTRAL.get(what, {}).items() if name not in known}
    return {n: v for n, v in ours.items() if n not in neutral or not _changes_nothing(v, neutral[n])}


def _changes_nothing(value: Any, neutral: list[Any]) -> bool:
    value = getattr(value, "value", value)  # of an Enum
    return value is None or ANY in neutral or any(_is_same(value, n) for n in neutral)


def _is_same(a: Any, b: Any) -> bool:
    """0 is 0.0, and True is not 1."""
    are_numbers = all(isinstance(value, Real) and not isinstance(value, bool) for value in (a, b))
    return (are_numbers or type(a) is type(b)) and a == b
