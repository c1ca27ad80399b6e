"""What scripts for vLLM and nano-vllm may say that this engine does not have: data for names.py and refused.py.

An entry begins at the left margin: words, two dashes, and what they ask for or why they are not here. "any value" are
options that say how fast, how loud or where, never what; "on or off" are switches of the same kind; name=value|value
are the values that ask for nothing. A word is a Python literal, or text.
"""

# Options of an LLM.
ENGINE = """
swap_space max_parallel_loading_workers max_seq_len_to_capture distributed_executor_backend optimization_level
    served_model_name max_logprobs ignore_patterns mm_processor_cache_gb kv_offloading_size max_cpu_loras
    safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size pt_load_map_location
    cudagraph_capture_sizes max_cudagraph_capture_size ir_op_priority kernel_config moe_backend linear_backend
    sparse_indexer_topk_backend all2all_backend gdn_prefill_backend kda_prefill_backend kda_decode_backend mamba_backend
    mamba_ssu_algorithm mamba_config mamba_block_size mamba_cache_mode replayssm_buffer_len performance_mode
    renderer_num_workers distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind_nodes numa_bind_cpus
    dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_backend
    dbo_decode_token_threshold dbo_prefill_token_threshold ubatch_size dp_sync_interval expert_placement_strategy
    eplb_config fault_tolerance_config ec_manager_config kv_offloading_backend offload_backend offload_num_in_group
    offload_prefetch_step master_addr master_port mm_processor_cache_type mm_hasher_algorithm
    mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin mm_tensor_ipc
    mm_processor_device mm_ipc_gpu_memory_gb video_pruning_rate video_pruning_method custom_histogram_buckets
    jit_monitor_mode per_request_spec_decode_metrics show_hidden_metrics_for_version logging_config log_level
    log_config_file shutdown_timeout prefill_schedule_interval prefix_match_unit -- any value
disable_log_stats use_tqdm_on_load disable_custom_all_reduce disable_cascade_attn disable_mm_preprocessor_cache
    trust_remote_code enable_chunked_prefill async_scheduling enable_expert_parallel aggregate_engine_logging
    enable_shm_tensor_arena allow_deprecated_quantization jit_monitor_verbose scheduler_reserve_full_isl
    disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization cudagraph_metrics enable_mfu_metrics
    enable_logging_iteration_details numa_bind enable_mm_processor_stats fail_on_environ_validation fully_sharded_loras
    specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras disable_chunked_mm_input
    language_model_only mm_device_do_normalize interleave_mm_strings swa_bounded_replay enable_flashinfer_autotune
    enable_batch_sharded_sampling enable_ep_weight_filter use_fp64_gumbel dcp_q_replicate enable_cumem_allocator
    enable_nccl_comm_suspend sleep_mode_offload_cudagraph long_prefill_token_threshold_adaptive
    enable_mamba_shared_prefix_checkpoint use_replayssm -- on or off
tokenizer_mode=auto|hf|slow -- another kind of tokenizer than transformers' own
skip_tokenizer_init=False -- work without a tokenizer
task=auto|generate -- embeddings or scores by an old name (`runner`, `convert`)
override_pooler_config=None -- a pooler by its old name (`pooler_config`)
media_io_kwargs={} skip_mm_profiling=False enable_prompt_embeds=False enable_mm_embeds=False mm_encoder_only=False
    default_mm_loras=None io_processor_plugin=None ec_transfer_config=None -- input that is neither text nor images
max_num_partial_prefills=1 max_long_partial_prefills=1 -- a bound on cut prompts (ours: `long_prefill_token_threshold`)
stream_interval=1 -- streaming in larger pieces
pipeline_parallel_size=1 data_parallel_size=1 decode_context_parallel_size=1 prefill_context_parallel_size=1 nnodes=1
    node_rank=0 data_parallel_hybrid_lb=False data_parallel_external_lb=False data_parallel_multi_port_external_lb=False
    enable_elastic_ep=False enable_eplb=False enable_dbo=False enable_hc_sp=False enable_fault_tolerance=False
    data_parallel_rank=None data_parallel_start_rank=None data_parallel_size_local=None data_parallel_address=None
    data_parallel_rpc_port=None elastic_ep_max_dp_size=None -- parallelism other than tensor_parallel_size
kv_transfer_config=None -- a KV cache that is shared with other engines
spec_method=None spec_model=None spec_tokens=None -- draft tokens (ours: `speculative_config`)
compilation_config=0|{} -- vLLM's compiler
attention_backend=None attention_config=None -- vLLM's attention backends (ours: `optimizations`)
download_dir=None -- downloads elsewhere than in the hub's cache (HF_HOME says where)
override_generation_config={} -- other sampling defaults (ours: `generation_config`)
chat_template=None -- a chat template for all chats (ours: chat(chat_template=...))
device_ids=None -- other devices than the first ones (CUDA_VISIBLE_DEVICES names them)
max_num_queued_reqs=None max_num_queued_tokens=None -- limits of the queue (ours: `--max-waiting` of `nanovllm serve`)
max_num_active_seqs=None max_num_scheduled_tokens=None -- another limit of a step (ours: `max_num_seqs`,
    `max_num_batched_tokens`)
reasoning_parser_plugin="" -- code of yours
enable_layerwise_nvtx_tracing=False ray_workers_use_nsight=False -- a profile (ours: examples/profile_step.py)
config_format=auto|hf hf_config_path=None model_impl=auto|vllm model_class_overrides={} calculate_kv_scales=False
    scheduler_cls=None cpu_offload_gb=0 lora_dtype=auto logprobs_mode=raw_logprobs reasoning_parser=""
    reasoning_config=None structured_outputs_config={}|{"backend":"guidance"} disable_sliding_window=False
    enable_sleep_mode=False sleep_preserve_parameter_names=[] worker_cls=auto worker_extension_cls=""
    additional_config={} code_revision=None tokenizer_revision=None hf_token=None model_loader_extra_config={}
    quantization_config=None cpu_offload_params=[]|None offload_params=[] offload_group_size=0
    prefix_cache_retention_interval=0 watermark=0.0 kv_sharing_fast_prefill=False kv_cache_dtype_skip_layers=[]
    mamba_cache_dtype=auto mamba_ssm_cache_dtype=auto enable_mamba_cache_stochastic_rounding=False
    mamba_cache_philox_rounds=0 enable_return_routed_experts=False aux_output_config=None return_sampling_mask=False
    enable_trace_replay=False model_weights="" weight_transfer_config=None lora_target_modules=None
    enable_tower_connector_lora=False max_lora_cls_labels=None watermark_config=None diffusion_config=None
    engram_config=None otlp_traces_endpoint=None collect_detailed_traces=None tokens_only=False -- something that is not
    here
"""
# Options of nano-vllm's LLM.
NANO_ENGINE = """
hf_config=None -- another config.json than the checkpoint's (ours: `hf_overrides`)
eos=-1 -- another end of sequence than the checkpoint's (ours: SamplingParams(stop_token_ids=[...]))
"""
# Options of `vllm serve`, beside those of an LLM.
FLAGS = """
uvicorn_log_level disable_access_log_for_endpoints max_log_len h11_max_incomplete_event_size h11_max_header_count
    cohere_format anthropic_disabled_thinking_effort data_parallel_supervisor_port dp_supervisor_probe_interval_s
    dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold -- any value
enable_log_requests enable_log_deltas log_error_stack enable_prompt_tokens_details enable_server_load_tracking
    enable_request_id_headers disable_fastapi_docs enable_flash_late_interaction cohere_is_reasoning_model
    enable_auto_tool_choice -- on or off
enable_per_request_metrics=False -- times of each request in its answer (ours: the log's lines and /metrics)
ssl_keyfile=None ssl_certfile=None ssl_ca_certs=None ssl_ciphers=None ssl_cert_reqs=0 enable_ssl_refresh=False -- TLS
    (put a proxy before the server)
uds=None -- a Unix socket (ours: --host and --port)
root_path=""|None -- a path before all paths (let the proxy take it off)
allow_credentials=False allowed_methods=["*"] allowed_headers=["*"] -- other CORS headers (ours: --allowed-origins)
middleware=[] tool_parser_plugin="" -- code of yours
trust_request_mm_kwargs=False -- input that is not text
enable_scale_out=False -- the paths of a group of servers (/render, /inference)
enable_log_outputs=False config=None api_server_count=1 headless=False grpc=False grpc_port=None
    enable_offline_docs=False sse_keep_alive_interval=0 trust_request_chat_template=False response_role=assistant
    tool_server=None tool_strict_level=auto fingerprint_mode=full|hash|none fingerprint_value=None -- something that is
    not here
"""
# Options of SamplingParams.
SAMPLING = """
skip_clone -- any value
use_beam_search=False length_penalty=1.0 early_stopping=False -- beam search (ours: LLM.beam_search)
best_of=1 -- the best of several answers
stream_interval=1 -- streaming in larger pieces
thinking_token_budget=None -- a limit on reasoning
flat_logprobs=False prompt_logprob_token_ids=None prompt_logprob_start=None truncate_prompt_tokens=None
    skip_reading_prefix_cache=False repetition_detection=None watermarking=False trace_decode_token_ids=None
    routed_experts_prompt_start=0 -- something that is not here
"""
# Options of StructuredOutputsParams.
STRUCTURED = """
whitespace_pattern=None -- something that is not here
"""
# Options of BeamSearchParams.
BEAM_SEARCH = """
include_stop_str_in_output -- any value
structured_outputs=None -- beams that fit a form
watermarking=False -- something that is not here
"""
# Options of PoolingParams.
POOLING = """
requires_token_ids -- any value
normalize=None softmax=None activation=None -- normalization by its old name (`use_activation`)
step_tag_id=None returned_token_ids=None skip_reading_prefix_cache=False late_interaction_params=None extra_kwargs={}
    output_kind=2 -- something that is not here
"""
# Options of pooler_config.
POOLER = """
enable_flash_late_interaction -- any value
normalize=None softmax=None activation=None -- normalization by its old name (`use_activation`)
tok_pooling_type=ALL -- a vector of each token
enable_chunked_processing=False max_embed_len=None logit_mean=None logit_sigma=None step_tag_id=None
    returned_token_ids=None -- something that is not here
"""
# Options of tokenization_kwargs.
TOKENIZATION = """
truncation=False max_length=None -- truncation by the tokenizer (ours: truncate_prompt_tokens)
padding=False|do_not_pad pad_prompt_tokens=None do_lower_case=False -- something that is not here
"""
# Options of speculative_config.
SPECULATIVE = """
disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction draft_sample_method -- any value
draft_tensor_parallel_size=1 tensor_parallel_size=1 -- a draft model on several ranks
num_speculative_tokens_per_batch_size=None -- a number of draft tokens by batch size (here it is measured)
enforce_eager=None attention_backend=None moe_backend=None kv_cache_dtype=None code_revision=None
    use_heterogeneous_vocab=False parallel_drafting=False rejection_sample_method=standard -- something that is not here
"""
# Options of LoRARequest.
LORA = """
base_model_name -- any value
tensorizer_config_dict=None is_3d_lora_weight=False -- an adapter in another format than PEFT's
"""
# Options of profiler_config.
PROFILER = """
torch_profiler_with_memory torch_profiler_with_flops torch_profiler_with_stack torch_profiler_use_gzip
    torch_profiler_record_shapes torch_profiler_dump_cuda_time_total ignore_frontend -- any value
delay_iterations=0 max_iterations=0 -- something that is not here
"""
# Options of kv_events_config; those at any value are ZeroMQ's.
KV_EVENTS = """
endpoint replay_endpoint buffer_steps hwm max_queue_size topic -- any value
"""
# Options of a prompt that is a dict.
PROMPT = """
multi_modal_data={} mm_processor_kwargs={} -- images (LLM.generate() and chat() take them, with a model that sees them)
multi_modal_uuids={} prompt_embeds=None -- input that is neither text nor images
encoder_prompt=None decoder_prompt=None token_type_ids=None -- something that is not here
"""
# Options of generate() and chat().
CALL = """
mm_processor_kwargs={} -- options of images (in a prompt's dict, or in chat())
tokenization_kwargs={} -- something that is not here
"""
# Options of AsyncLLM.generate(), beside those.
ASYNC_CALL = """
session_id -- any value
prompt_text=None -- another text of a prompt (ours: a dict with `prompt` and `prompt_token_ids`)
data_parallel_rank=None -- parallelism other than tensor_parallel_size
kv_hints=None -- a KV cache that is shared with other engines
trace_headers=None reasoning_ended=None reasoning_parser_kwargs={} -- something that is not here
"""
# Options of AsyncLLM.from_engine_args().
ASYNC = """
usage_context client_addresses client_count client_index -- any value
start_engine_loop -- on or off
stat_loggers=[] -- statistics of yours (ours: stats(), do_log_stats())
"""
# Fields of a body in OpenAI's API, beside those of SamplingParams.
BODY = """
user metadata service_tier safety_identifier prompt_cache_key parallel_tool_calls store verbosity prompt_cache_retention
    prompt_cache_options request_id session_id truncation_side return_mm_kwargs include_reasoning
    guided_decoding_backend -- any value
logits_processors=[] -- code of yours on the logits
stream=False stream_options={}|None -- streaming
suffix="" -- text behind the completion
reasoning_effort=none -- a limit on reasoning
modalities=["text"] audio=None prediction=None prompt_embeds=[]|None media_io_kwargs={} -- input or output that is
    neither text nor images
mm_processor_kwargs={} -- options of images (in a chat)
multi_modal_data={} mm_payload=None -- images (in a chat, as parts of a message)
guided_json=None guided_regex=None guided_choice=None guided_grammar=None guided_whitespace_pattern=None -- an answer
    that fits a form, in vLLM's old words (`structured_outputs` and `response_format` are the new ones)
documents=[] -- documents for the template (ours: `chat_template_kwargs`)
return_prompt_text=False -- what a template made of a chat (ours: POST /tokenize)
kv_transfer_params={} ec_transfer_params={} -- a KV cache that is shared with other engines
detokenize=True web_search_options=None moderation=None functions=[] function_call=none|auto return_token_offsets=False
    vllm_xargs={} -- something that is not here
"""
# Fields of a body of /v1/responses, beside those of a chat.
RESPONSE = """
max_tool_calls truncation -- any value
conversation=None -- a conversation by a name (ours: `previous_response_id`)
prompt=None -- a prompt that is kept elsewhere
enable_response_messages=False -- the messages that the model saw (ours: POST /tokenize)
n=1 -- several answers
echo=False prompt_logprobs=None logprob_token_ids=[] return_token_ids=False return_tokens_as_token_ids=False -- what
    only the other endpoints show
continue_final_message=False add_generation_prompt=True -- an open message (ours: status incomplete of the last item)
image=None -- output that is not text
context_management=[] previous_input_messages=[] previous_response=None access_programs=None background_options={} --
    something that is not here
"""
# Fields of a body of /v1/embeddings, /rerank, /score and /pooling.
POOLING_BODY = """
user -- any value
multi_modal_data={} mm_processor_kwargs={} media_io_kwargs={} -- images (a chat of a model that generates takes them)
normalize=None softmax=None activation=None -- normalization by its old name (`use_activation`)
messages=[] -- a chat (write it as a text: POST /tokenize shows how its template would)
padding=do_not_pad embed_dtype=float32 endianness=native|little -- something that is not here
"""

# Paths of vLLM's server and of OpenAI's, and what to do instead.
PATHS = """
/v1/embeddings /pooling /score /v1/score /rerank /v1/rerank /v2/rerank -- a server that was started with --runner
    pooling has it
/v2/embed -- POST /v1/embeddings, which is OpenAI's; a server that was started with --runner pooling has it
/classify -- POST /pooling, with the numbers in the order of the labels; start the server with --runner pooling
/generative_scoring -- `prompt_logprobs`, or echo with logprobs, score a text
/v1/moderations -- there is no judgement of texts; a classifier (POST /pooling) may give one
/v1/audio/transcriptions /v1/audio/translations /v1/audio/speech /v1/images/generations /v1/realtime -- text in, text
    out: there are no sounds and no images
/v1/messages /v1/messages/count_tokens /cohere/v2/chat /v1/systemone -- the API here is OpenAI's: POST
    /v1/chat/completions
/invocations -- send the same body to /v1/chat/completions, or to /v1/completions
/v1/chat/completions/batch -- a request has one conversation; `nanovllm run-batch` answers a file of them
/v1/batches /v1/files -- batch jobs need no server: `nanovllm run-batch` answers a file
/v1/load_lora_adapter /v1/unload_lora_adapter -- adapters are named at the start (--lora-modules NAME=PATH), unless
    --allow-runtime-lora-updating is given
/tokenizer_info -- it shows the chat template: start the server with --enable-tokenizer-info-endpoint
/start_profile /stop_profile -- examples/profile_step.py shows where a step's time goes
/sleep /wake_up /is_sleeping /release_kv_cache_memory -- memory is given back by ending the server
/pause /resume /is_paused -- the page at / pauses an engine: --classroom
/abort_requests /inference/v1/abort_requests -- a client that hangs up ends its request
/reset_mm_cache /reset_encoder_cache -- what was made of images is dropped when newer ones need the room
/server_info -- /v1/models and /metrics say what runs here, /version which version
/collective_rpc /init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update
    /start_draft_weight_update /update_weights /finish_weight_update /update_weight_version /weight_info /weight_checker
    -- weights stay as they were loaded; start the server again for others
/get_world_size /kv_event_sources /scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply
    /fault_tolerance/status /inference/v1/generate -- one machine, one server: there is no group of engines to tell of
/v1/completions/render /v1/chat/completions/render /v1/responses/render /v1/messages/render /v1/completions/derender
    /v1/chat/completions/derender -- POST /tokenize says which tokens a prompt or a chat has, POST /detokenize what they
    say
/docs /redoc /openapi.json -- OpenAI's documents describe the API
"""
# Modules with all that is below them, or names in a module. The longest one that fits is taken.
MODULES = """
assets multimodal connections entrypoints.speech_to_text inputs.EmbedsPrompt inputs.MultiModalDataDict
    inputs.MultiModalDataBuiltins inputs.MultiModalUUIDDict inputs.MultiModalInput inputs.mm_input
    inputs.ExplicitEncoderDecoderPrompt inputs.build_explicit_enc_dec_prompt inputs.zip_enc_dec_prompts
    inputs.data.ExplicitEncoderDecoderPrompt inputs.StreamingInput engine.protocol.StreamingInput -- input is text and
    PIL images: there are no sounds, videos, embeddings or encoders
config.pooler entrypoints.pooling entrypoints.score_utils -- pooling is LLM.embed(), score(), classify() and encode(),
    and the server's --runner pooling
config -- options are arguments of LLM or EngineArgs, and plain dicts where they have parts
distributed config.kv_transfer config.KVTransferConfig config.WeightTransferConfig -- there is no KV cache shared with
    other engines, no expert parallelism and no transfer of weights
ModelRegistry model_executor models model_inspection -- models are nanovllm/worker/model.py and what it loads; there is
    no registry, and no loader to choose
v1.sample logits_process -- functions come with SamplingParams(logits_processors=[...]), classes with
    LLM(logits_processors=[...])
initialize_ray_cluster ray executor v1.executor worker.worker worker.worker_base v1.worker v1.pool -- one process steps
    the engine; tensor_parallel_size starts ranks by itself, without Ray
v1.metrics usage tracing -- the counters are LLM.get_metrics() and the server's /metrics
benchmarks -- nanovllm bench measures; a data set is a file of your own
entrypoints -- the server is `nanovllm serve` and its parts are in nanovllm.serving
renderers inputs.engine inputs.parse inputs.preprocess inputs.tokens_input inputs.EngineInput -- generate() takes text,
    token ids or a dict; chat_prompt() shows what a template makes of a conversation
tool_parsers reasoning parser -- answers are read by the server, by the format that the chat template has
profiler -- a profile is start_profile() and stop_profile(), or examples/profile_step.py
transformers_utils.config -- transformers has it, and loads without this engine; here weights stay as they were loaded;
    start the server again for others
envs env_override -- the environment has none of vLLM's switches: options are arguments
plugins -- plugins are not loaded
sampling_params.GuidedDecodingParams -- its newer name is StructuredOutputsParams
sampling_params.RepetitionDetectionParams -- answers do not end at a repetition
_C _custom_ops _aiter_ops attention collect_env compilation cute_utils device_allocator distributed.parallel_state
    engine entrypoints.utils forward_context inputs ir kernels logging_utils platforms scalar_type sequence snapshot
    spec_decode tasks third_party tokenizers transformers_utils triton_utils utils v1 vllm_flash_attn prompt_adapter
    outputs.RequestError outputs.SamplingMask outputs.WeightVersionSpan outputs.STREAM_FINISHED
    sampling_params.SamplingType sampling_params.ThinkingTokenBudget -- it is an inner part of vLLM; nanovllm/README.md
    says where the same thing happens here
"""
NANO_MODULES = """
layers -- the layers are in nanovllm/worker/layers.py and model.py
layers.activation -- it is a function, silu_and_mul in nanovllm/worker/kernels.py
layers.attention -- attention is two functions: rotary_and_write in nanovllm/worker/kernels.py writes K and V,
    paged_attention in nanovllm/worker/attention.py reads them; the layer is Attention in nanovllm/worker/model.py
layers.embed_head -- the embedding and the output head are embed() and logits() of Decoder in nanovllm/worker/model.py;
    ParallelDecoder in nanovllm/features/parallel/parallel_layers.py splits them over ranks
layers.linear -- Linear in nanovllm/worker/layers.py merges projections (out_sizes), and a rank's is one of smaller
    sizes; nanovllm/features/parallel/ cuts a rank's share out of the checkpoint
layers.rotary_embedding -- it is a function, rotate in nanovllm/worker/kernels.py; a ModelRunner makes its one
    RotaryEmbedding
layers.sampler -- it is a function, sample in nanovllm/worker/sampler.py; what the rows of a step ask for is a
    SamplingBatch
models.qwen3 -- one decoder serves all architectures: nanovllm/worker/model.py
utils.context -- there is no global context: a step's arrays are a Batch (nanovllm/worker/batch.py), which a layer gets
    in its ForwardContext (nanovllm/worker/layers.py)
utils.loader -- weights come into place in load_model, in nanovllm/worker/loader.py
"""
# Methods and attributes of LLM, LLMEngine and AsyncLLM, and what to do instead.
METHODS = """
reward -- classify() gives a classifier's numbers, and PoolingParams(use_activation=False) its logits
sleep wake_up is_sleeping release_kv_cache_memory -- memory is given back by deleting the LLM
collective_rpc apply_model -- the weights are in llm.engine.model_runner.model
init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update start_draft_weight_update update_weights
    finish_weight_update update_weight_version get_weight_version set_weight_version compute_weight_checksums
    checkpoint_prepare checkpoint_restore -- weights stay as they were loaded; build another LLM for others
renderer -- chat_prompt() shows what a template makes of a conversation
vllm_config engine_core -- options are in `engine.config`; the engine runs in this process
enqueue_chat -- enqueue() takes what chat_prompt() makes of a conversation
get_world_size -- it is the option tensor_parallel_size
reset_mm_cache reset_encoder_cache -- input is text: nothing else is cached
from_vllm_config get_supported_tasks -- options are EngineArgs, and the task is to generate
do_log_stats do_log_stats_with_interval -- get_metrics() has the counters
add_request -- generate() queues a request and gives its outputs
check_admission -- generate() raises Overloaded where max_waiting sequences wait; stats() counts them
get_num_queued_tokens -- stats() has what waits and what runs
get_status handle_fault scale_elastic_ep get_kv_event_sources has_unfinished_requests_dp
    notify_kv_transfer_request_rejected -- one machine, one engine
"""
NANO_METHODS = """
exit -- memory is given back, and ranks end, when the LLM is deleted or the process ends
is_finished -- llm.engine.has_unfinished_requests() is its opposite
step scheduler model_runner tokenizer -- it is of llm.engine, and step() returns RequestOutputs
"""
