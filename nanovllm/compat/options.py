"""vLLM's rarer options of an engine, its server's flags and its server's paths, by the rule of names.py.

Here they are grouped by what they ask for. examples/move_to_vllm.md lists them by name.
"""

from typing import Any

ANY = object()  # neutral at every value: it says how fast, how loud or where, never what
Table = dict[str, tuple[str, tuple[Any, ...]]]  # name -> what another value would ask for, the neutral values


def asks(reason: str, **neutral: Any) -> Table:
    """Options for one thing, each with its neutral value; a tuple stands for several."""
    return {name: (reason, value if isinstance(value, tuple) else (value,)) for name, value in neutral.items()}


def anything(names: str) -> Table:
    return dict.fromkeys(names.split(), ("", (ANY,)))


def switches(names: str) -> Table:
    """Neutral on and off. As flags they take no value, and so never the word that comes next."""
    return dict.fromkeys(names.split(), ("something that is neither on nor off", (True, False)))


OFF: dict[str, Any] = dict.fromkeys(
    "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb enable_elastic_ep "
    "enable_eplb enable_dbo enable_hc_sp enable_fault_tolerance".split(),
    False,
)
ALONE: dict[str, Any] = dict.fromkeys(
    "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
    "data_parallel_rpc_port elastic_ep_max_dp_size".split()
)
MORE: Table = {  # options of an engine, beside those of names.py
    **switches("aggregate_engine_logging enable_shm_tensor_arena allow_deprecated_quantization jit_monitor_verbose"),
    **switches("scheduler_reserve_full_isl disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization"),
    **switches("cudagraph_metrics enable_mfu_metrics enable_logging_iteration_details numa_bind"),
    **switches("enable_mm_processor_stats fail_on_environ_validation fully_sharded_loras specialize_active_lora"),
    **switches("enable_mixed_moe_lora_format enable_moe_shared_loras disable_chunked_mm_input language_model_only"),
    **switches("mm_device_do_normalize interleave_mm_strings swa_bounded_replay enable_flashinfer_autotune"),
    **switches("enable_batch_sharded_sampling enable_ep_weight_filter use_fp64_gumbel dcp_q_replicate"),
    **switches("enable_cumem_allocator enable_nccl_comm_suspend sleep_mode_offload_cudagraph"),
    **switches("long_prefill_token_threshold_adaptive enable_mamba_shared_prefix_checkpoint use_replayssm"),
    **anything("safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size"),
    **anything("pt_load_map_location cudagraph_capture_sizes max_cudagraph_capture_size ir_op_priority kernel_config"),
    **anything("moe_backend linear_backend sparse_indexer_topk_backend all2all_backend gdn_prefill_backend"),
    **anything("kda_prefill_backend kda_decode_backend mamba_backend mamba_ssu_algorithm mamba_config"),
    **anything("mamba_block_size mamba_cache_mode replayssm_buffer_len performance_mode renderer_num_workers"),
    **anything("distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind_nodes numa_bind_cpus"),
    **anything("dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_backend"),
    **anything("dbo_decode_token_threshold dbo_prefill_token_threshold ubatch_size dp_sync_interval"),
    **anything("expert_placement_strategy eplb_config fault_tolerance_config ec_manager_config kv_offloading_backend"),
    **anything("offload_backend offload_num_in_group offload_prefetch_step master_addr master_port"),
    **anything("mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode"),
    **anything(
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path"
    ),
    **anything("mm_encoder_fp8_scale_save_margin mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb"),
    **anything("video_pruning_rate video_pruning_method custom_histogram_buckets"),
    **anything("jit_monitor_mode per_request_spec_decode_metrics show_hidden_metrics_for_version"),
    **anything("logging_config log_level log_config_file shutdown_timeout prefill_schedule_interval prefix_match_unit"),
    **asks("parallelism other than tensor_parallel_size", **OFF, **ALONE),
    **asks("other devices than the first ones (CUDA_VISIBLE_DEVICES names them)", device_ids=None),
    **asks("parts of the model or of the cache in another memory", cpu_offload_params=([], None), offload_params=[]),
    **asks("parts of the model or of the cache in another memory", offload_group_size=0),
    **asks("limits of the queue (ours: `--max-waiting` of `nanovllm serve`)", max_num_queued_reqs=None),
    **asks("limits of the queue (ours: `--max-waiting` of `nanovllm serve`)", max_num_queued_tokens=None),
    **asks("another limit of a step (ours: `max_num_seqs`, `max_num_batched_tokens`)", max_num_active_seqs=None),
    **asks("another limit of a step (ours: `max_num_seqs`, `max_num_batched_tokens`)", max_num_scheduled_tokens=None),
    **asks("another order in which blocks are evicted", prefix_cache_retention_interval=0, watermark=0.0),
    **asks("a KV cache that layers share or hold in several dtypes", kv_sharing_fast_prefill=False),
    **asks("a KV cache that layers share or hold in several dtypes", kv_cache_dtype_skip_layers=[]),
    **asks("another state of layers with one", mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto"),
    **asks("another state of layers with one", enable_mamba_cache_stochastic_rounding=False),
    **asks("another state of layers with one", mamba_cache_philox_rounds=0),
    **asks("input that is not text", enable_mm_embeds=False, mm_encoder_only=False, default_mm_loras=None),
    **asks("input that is not text", io_processor_plugin=None, ec_transfer_config=None),
    **asks("which experts were met", enable_return_routed_experts=False, aux_output_config=None),
    **asks("which tokens could be sampled", return_sampling_mask=False),
    **asks("tokens that are given instead of sampled", enable_trace_replay=False),
    **asks("weights from another place than the checkpoint", model_weights="", weight_transfer_config=None),
    **asks("adapters of parts of the model only", lora_target_modules=None, enable_tower_connector_lora=False),
    **asks("adapters of parts of the model only", max_lora_cls_labels=None),
    **asks("a watermark", watermark_config=None),
    **asks("another kind of model", diffusion_config=None, engram_config=None),
    **asks("code of yours", reasoning_parser_plugin=""),
    **asks("traces", otlp_traces_endpoint=None, collect_detailed_traces=None),
    **asks("a profile (ours: examples/profile_step.py)", enable_layerwise_nvtx_tracing=False),
    **asks("a profile (ours: examples/profile_step.py)", ray_workers_use_nsight=False),
    **asks("memory given back while idle", sleep_preserve_parameter_names=[]),
    **asks("tokens in, tokens out", tokens_only=False),
}
TLS: dict[str, Any] = dict.fromkeys("ssl_keyfile ssl_certfile ssl_ca_certs ssl_ciphers".split())
TLS |= dict(ssl_cert_reqs=0, enable_ssl_refresh=False)
FLAGS: Table = {  # of `vllm serve`, beside an engine's options
    **switches("enable_log_requests enable_log_deltas log_error_stack"),
    **switches("enable_prompt_tokens_details enable_server_load_tracking enable_request_id_headers"),
    **switches("disable_fastapi_docs enable_flash_late_interaction cohere_is_reasoning_model"),
    **anything("uvicorn_log_level disable_access_log_for_endpoints max_log_len h11_max_incomplete_event_size"),
    **anything("h11_max_header_count cohere_format anthropic_disabled_thinking_effort data_parallel_supervisor_port"),
    **anything("dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold"),
    **asks("answers in the log, which are nobody else's business", enable_log_outputs=False),
    **asks(
        "times of each request in its answer (ours: the log's lines and /metrics)", enable_per_request_metrics=False
    ),
    **asks("TLS (put a proxy before the server)", **TLS),
    **asks("a Unix socket (ours: --host and --port)", uds=None),
    **asks("a path before all paths (let the proxy take it off)", root_path=("", None)),
    **asks("other CORS headers (ours: --allowed-origins)", allow_credentials=False, allowed_methods=["*"]),
    **asks("other CORS headers (ours: --allowed-origins)", allowed_headers=["*"]),
    **asks("code of yours", middleware=[], tool_parser_plugin=""),
    **asks("a file of flags", config=None),
    **asks("several servers for one engine", api_server_count=1, headless=False),
    **asks("gRPC", grpc=False, grpc_port=None),
    **asks("pages that describe the API", enable_offline_docs=False),
    **asks("comments in a stream that is silent", sse_keep_alive_interval=0),
    **asks("chat templates from whoever sends a request", trust_request_chat_template=False),
    **asks("input that is not text", trust_request_mm_kwargs=False),
    **asks("another role than the assistant's", response_role="assistant"),
    **asks("tools that run on the server", tool_server=None),
    **switches("enable_auto_tool_choice"),
    **asks("another rule than each function's own `strict`", tool_strict_level="auto"),
    **asks("the paths of a group of servers (/render, /inference)", enable_scale_out=False),
    **asks("a fingerprint of the engine in each answer", fingerprint_mode=("full", "hash", "none")),
    **asks("a fingerprint of the engine in each answer", fingerprint_value=None),
}
RESPONSE: Table = {  # fields of a body of /v1/responses, beside those that it shares with a chat's
    **anything("max_tool_calls truncation"),
    **asks("a conversation by a name (ours: `previous_response_id`)", conversation=None),
    **asks("a prompt that is kept elsewhere", prompt=None),
    **asks("a conversation that is cut or rewritten", context_management=[]),
    **asks("a conversation in another format than items", previous_input_messages=[], previous_response=None),
    **asks("the messages that the model saw (ours: POST /tokenize)", enable_response_messages=False),
    **asks("several answers", n=1),
    **asks("what only the other endpoints show", echo=False, prompt_logprobs=None, logprob_token_ids=[]),
    **asks("what only the other endpoints show", return_token_ids=False, return_tokens_as_token_ids=False),
    **asks("an open message (ours: status incomplete of the last item)", continue_final_message=False),
    **asks("an open message (ours: status incomplete of the last item)", add_generation_prompt=True),
    **asks("input or output that is not text", image=None),
    **asks("programs of OpenAI's", access_programs=None),
    **asks("another time for work in the background", background_options={}),
}

POOLING = "a server that was started with --runner pooling has it"
WEIGHTS = "weights stay as they were loaded; start the server again for others"
SLEEP = "memory is given back by ending the server"
GROUP = "one machine, one server: there is no group of engines to tell of"
RENDER = "POST /tokenize says which tokens a prompt or a chat has, POST /detokenize what they say"
PATHS = {  # of vLLM's server and of OpenAI's, that this server lacks -> what to do instead
    **dict.fromkeys("/v1/embeddings /pooling /score /v1/score /rerank /v1/rerank /v2/rerank".split(), POOLING),
    "/v2/embed": "POST /v1/embeddings, which is OpenAI's; a server that was started with --runner pooling has it",
    "/classify": "POST /pooling, with the numbers in the order of the labels; start the server with --runner pooling",
    "/generative_scoring": "`prompt_logprobs`, or echo with logprobs, score a text",
    "/v1/moderations": "there is no judgement of texts; a classifier (POST /pooling) may give one",
    **dict.fromkeys(
        "/v1/audio/transcriptions /v1/audio/translations /v1/audio/speech /v1/images/generations /v1/realtime".split(),
        "text in, text out: there are no sounds and no images",
    ),
    **dict.fromkeys(
        "/v1/messages /v1/messages/count_tokens /cohere/v2/chat /v1/systemone".split(),
        "the API here is OpenAI's: POST /v1/chat/completions",
    ),
    "/invocations": "send the same body to /v1/chat/completions, or to /v1/completions",
    "/v1/chat/completions/batch": "a request has one conversation; `nanovllm run-batch` answers a file of them",
    **dict.fromkeys(("/v1/batches", "/v1/files"), "batch jobs need no server: `nanovllm run-batch` answers a file"),
    **dict.fromkeys(
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        "adapters are named at the start (--lora-modules NAME=PATH), unless --allow-runtime-lora-updating is given",
    ),
    "/tokenizer_info": "it shows the chat template: start the server with --enable-tokenizer-info-endpoint",
    **dict.fromkeys(("/start_profile", "/stop_profile"), "examples/profile_step.py shows where a step's time goes"),
    **dict.fromkeys("/sleep /wake_up /is_sleeping /release_kv_cache_memory".split(), SLEEP),
    **dict.fromkeys("/pause /resume /is_paused".split(), "the page at / pauses an engine: --classroom"),
    **dict.fromkeys(("/abort_requests", "/inference/v1/abort_requests"), "a client that hangs up ends its request"),
    **dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), "input is text: nothing else is cached"),
    "/server_info": "/v1/models and /metrics say what runs here, /version which version",
    **dict.fromkeys("/collective_rpc /init_weight_transfer_engine /shutdown_weight_transfer_engine".split(), WEIGHTS),
    **dict.fromkeys("/start_weight_update /start_draft_weight_update /update_weights".split(), WEIGHTS),
    **dict.fromkeys("/finish_weight_update /update_weight_version /weight_info /weight_checker".split(), WEIGHTS),
    **dict.fromkeys("/get_world_size /kv_event_sources /scale_elastic_ep /is_scaling_elastic_ep".split(), GROUP),
    **dict.fromkeys("/fault_tolerance/apply /fault_tolerance/status /inference/v1/generate".split(), GROUP),
    **dict.fromkeys("/v1/completions/render /v1/chat/completions/render /v1/responses/render".split(), RENDER),
    **dict.fromkeys("/v1/messages/render /v1/completions/derender /v1/chat/completions/derender".split(), RENDER),
    **dict.fromkeys(("/docs", "/redoc", "/openapi.json"), "OpenAI's documents describe the API"),
}
