"""What vLLM's scripts may say here, beyond what this engine has: one table, one rule.

An option that asks for something this engine does not do is accepted at the values that ask for nothing (None always
does), and refused at any other. An option that is not in the table either is a mistake. Methods that vLLM has and we
don't are refused by name. examples/move_to_vllm.md is the whole list; a test compares it with the code.
"""

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from nanovllm.checks.values import check_number, reject_unknown, shorten
from nanovllm.compat import nano_vllm, pooling
from nanovllm.compat.options import ANY, FLAGS, MORE, RESPONSE, Table
from nanovllm.compat.options import anything as _any
from nanovllm.compat.options import asks as _asks
from nanovllm.compat.options import switches as _switches

PARALLEL: dict[str, Any] = dict(pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1)
PARALLEL |= dict(prefill_context_parallel_size=1, nnodes=1, node_rank=0)
MEDIA: dict[str, Any] = dict(limit_mm_per_prompt={}, mm_processor_kwargs=None, media_io_kwargs={})
MEDIA |= dict(allowed_local_media_path="", allowed_media_domains=None, skip_mm_profiling=False)
MEDIA |= dict(enable_prompt_embeds=False)
ENGINE: Table = {
    **_switches("disable_log_stats use_tqdm_on_load disable_custom_all_reduce disable_cascade_attn"),
    **_switches("disable_mm_preprocessor_cache trust_remote_code"),  # the latter is a permission that is never used
    **_switches("enable_chunked_prefill async_scheduling enable_expert_parallel"),  # when and where, never what
    **_any("swap_space max_parallel_loading_workers max_seq_len_to_capture distributed_executor_backend"),
    **_any("optimization_level"),
    **_any("served_model_name max_logprobs ignore_patterns mm_processor_cache_gb"),
    **_asks("another kind of tokenizer than transformers' own", tokenizer_mode=("auto", "hf", "slow")),
    **_asks("work without a tokenizer", skip_tokenizer_init=False),
    **_asks("a configuration in another file than config.json", config_format=("auto", "hf"), hf_config_path=None),
    **_asks("another implementation of the model", model_impl=("auto", "vllm"), model_class_overrides={}),
    **_asks("embeddings or scores by an old name (`runner`, `convert`)", task=("auto", "generate")),
    **_asks("a pooler by its old name (`pooler_config`)", override_pooler_config=None),
    **_asks("input that is not text", **MEDIA),
    **_asks("scales of a KV cache that are measured before", calculate_kv_scales=False),
    **_asks("a bound on cut prompts (ours: `long_prefill_token_threshold`)", max_num_partial_prefills=1),
    **_asks("a bound on cut prompts (ours: `long_prefill_token_threshold`)", max_long_partial_prefills=1),
    **_asks("a scheduler of your own", scheduler_cls=None),
    **_asks("streaming in larger pieces", stream_interval=1),
    **_asks("parallelism other than tensor_parallel_size", **PARALLEL),
    **_asks("parts of the model in another memory", cpu_offload_gb=0),
    **_any("kv_offloading_size"),  # cpu_cache_bytes, in GiB: see RENAMED
    **_asks("a KV cache that is shared with other engines", kv_transfer_config=None),
    **_asks("draft tokens (ours: `speculative_config`)", spec_method=None, spec_model=None, spec_tokens=None),
    **_any("max_cpu_loras"),
    **_asks("adapters of another dtype than the model's", lora_dtype="auto"),
    **_asks("logprobs of other logits than the raw ones", logprobs_mode="raw_logprobs"),
    **_asks("splitting a model's reasoning off its answer", reasoning_parser="", reasoning_config=None),
    **_asks("vLLM's compiler", compilation_config=(0, {})),
    **_asks("vLLM's attention backends (ours: `optimizations`)", attention_backend=None, attention_config=None),
    **_asks("another backend than llguidance", structured_outputs_config=({}, {"backend": "guidance"})),
    **_asks("full attention where the checkpoint has a window", disable_sliding_window=False),
    **_asks("memory given back while idle", enable_sleep_mode=False),
    **_asks("vLLM's workers", worker_cls="auto", worker_extension_cls="", additional_config={}),
    **_asks("downloads elsewhere than in the hub's cache (HF_HOME says where)", download_dir=None),
    **_asks("files of another revision than the weights'", code_revision=None, tokenizer_revision=None),
    **_asks("another token for the hub than HF_TOKEN's", hf_token=None),
    **_asks("other sampling defaults (ours: `generation_config`)", override_generation_config={}),
    **_asks("a chat template for all chats (ours: chat(chat_template=...))", chat_template=None),
    **_asks("vLLM's loaders", model_loader_extra_config={}, quantization_config=None),
    **MORE,
}
SAMPLING: Table = {
    **_any("skip_clone"),
    **_asks("beam search (ours: LLM.beam_search)", use_beam_search=False, length_penalty=1.0, early_stopping=False),
    **_asks("the best of several answers", best_of=1),
    **_asks("logprobs in a flat list", flat_logprobs=False),
    **_asks("logprobs of chosen tokens in a prompt", prompt_logprob_token_ids=None),
    **_asks("logprobs of a part of the prompt", prompt_logprob_start=None),
    **_asks("streaming in larger pieces", stream_interval=1),
    **_asks("a prompt that is cut short", truncate_prompt_tokens=None),
    **_asks("a request that leaves the prefix cache alone", skip_reading_prefix_cache=False),
    **_asks("a limit on reasoning", thinking_token_budget=None),
    **_asks("an end at repetition", repetition_detection=None),
    **_asks("a watermark", watermarking=False),
    **_asks("tokens that are given instead of sampled", trace_decode_token_ids=None),
    **_asks("which experts were met", routed_experts_prompt_start=0),
}
STRUCTURED: Table = {**_asks("another pattern of whitespace", whitespace_pattern=None)}
SPECULATIVE: Table = {
    **_any("disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction draft_sample_method"),
    **_asks("a draft model on several ranks", draft_tensor_parallel_size=1, tensor_parallel_size=1),
    **_asks("other code for the draft model", enforce_eager=None, attention_backend=None, moe_backend=None),
    **_asks("a KV cache of another dtype than the model's", kv_cache_dtype=None),
    **_asks("files of another revision than the weights'", code_revision=None),
    **_asks("draft tokens in another vocabulary", use_heterogeneous_vocab=False),
    **_asks("a model that proposes several tokens at once", parallel_drafting=False),
    **_asks("a number of draft tokens by batch size (here it is measured)", num_speculative_tokens_per_batch_size=None),
    **_asks("acceptance other than of exactly what is sampled", rejection_sample_method="standard"),
}
LORA: Table = {
    **_any("base_model_name"),
    **_asks("an adapter in another format than PEFT's", tensorizer_config_dict=None, is_3d_lora_weight=False),
}
BEAM_SEARCH: Table = {
    **_any("include_stop_str_in_output"),  # of vLLM's server
    **_asks("beams that fit a form", structured_outputs=None),
    **_asks("a watermark", watermarking=False),
}
PROMPT: Table = {
    **_asks("input that is not text", multi_modal_data={}, mm_processor_kwargs={}, multi_modal_uuids={}),
    **_asks("input that is not text", prompt_embeds=None),
    **_asks("an encoder", encoder_prompt=None, decoder_prompt=None, token_type_ids=None),
}
CALL: Table = {
    **_asks("options of the tokenizer", tokenization_kwargs={}),
    **_asks("input that is not text", mm_processor_kwargs={}),
}
ASYNC_CALL: Table = CALL | {
    **_any("session_id"),
    **_asks("another text of a prompt (ours: a dict with `prompt` and `prompt_token_ids`)", prompt_text=None),
    **_asks("traces", trace_headers=None),
    **_asks("parallelism other than tensor_parallel_size", data_parallel_rank=None),
    **_asks("a KV cache that is shared with other engines", kv_hints=None),
    **_asks("splitting a model's reasoning off its answer", reasoning_ended=None, reasoning_parser_kwargs={}),
}
ASYNC: Table = {
    **_switches("start_engine_loop"),
    **_any("usage_context client_addresses client_count client_index"),
    **_asks("statistics of yours (ours: stats(), do_log_stats())", stat_loggers=[]),
}
CHAT: Table = CALL
BODY: Table = SAMPLING | {  # of a request in OpenAI's API
    **_any("user metadata service_tier safety_identifier prompt_cache_key parallel_tool_calls store verbosity"),
    **_any(
        "prompt_cache_retention prompt_cache_options request_id session_id truncation_side mm_payload return_mm_kwargs "
        "include_reasoning"
    ),
    **_asks("code of yours on the logits", logits_processors=[]),
    **_asks("streaming", stream=False, stream_options=({}, None)),
    **_asks("text behind the completion", suffix=""),
    **_asks("token ids instead of text", detokenize=True),
    **_asks("a limit on reasoning", reasoning_effort="none"),
    **_asks("input or output that is not text", modalities=["text"], audio=None, prediction=None),
    **_asks("input or output that is not text", prompt_embeds=([], None), media_io_kwargs={}, mm_processor_kwargs={}),
    **_asks("a search in the web", web_search_options=None),
    **_asks("a judgement of the text", moderation=None),
    **_asks("calls of tools in their old form", functions=[], function_call=("none", "auto")),
    **_asks(
        "an answer that fits a form, in vLLM's old words (`structured_outputs` and `response_format` are the new ones)",
        **dict.fromkeys("guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern".split()),
    ),
    **_any("guided_decoding_backend"),
    **_asks("documents for the template (ours: `chat_template_kwargs`)", documents=[]),
    **_asks("what a template made of a chat (ours: POST /tokenize)", return_prompt_text=False),
    **_asks("where tokens lie in a text", return_token_offsets=False),
    **_asks("arguments of plugins", vllm_xargs={}),
    **_asks("a KV cache that is shared with other engines", kv_transfer_params={}, ec_transfer_params={}),
}
TABLES = {
    "LLM": ENGINE | nano_vllm.OPTIONS,
    "SamplingParams": SAMPLING,
    "StructuredOutputsParams": STRUCTURED,
    "a prompt": PROMPT,
}
PROFILER: Table = {
    **_any("torch_profiler_with_memory torch_profiler_with_flops torch_profiler_with_stack torch_profiler_use_gzip"),
    **_any("torch_profiler_record_shapes torch_profiler_dump_cuda_time_total ignore_frontend"),
    **_asks("a profile of some steps only", delay_iterations=0, max_iterations=0),
}
KV_EVENTS: Table = {**_any("endpoint replay_endpoint buffer_steps hwm max_queue_size topic")}  # of ZeroMQ
TABLES |= pooling.TABLES
TABLES |= {
    "ProfilerConfig": PROFILER,
    "KVEventsConfig": KV_EVENTS,
    "SpeculativeConfig": SPECULATIVE,
    "LoRARequest": LORA,
    "generate": CALL,
    "chat": CHAT,
    "body": BODY,
    "BeamSearchParams": BEAM_SEARCH,
}
TABLES |= {"AsyncEngineArgs": ENGINE | _switches("enable_log_requests"), "AsyncLLM": ASYNC}
TABLES |= {"AsyncLLM.generate": ASYNC_CALL, "nanovllm serve": ENGINE | FLAGS, "body of a response": RESPONSE}


def _gib(size: Any) -> int:
    return int(check_number("kv_offloading_size", size, Real, 0, 1 << 20) * (1 << 30))


RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {  # another name of an option -> ours, its value there
    "kv_offloading_size": ("cpu_cache_bytes", _gib),
    "kvcache_block_size": ("block_size", lambda size: size),  # this and the next one: nano-vllm's
    "num_kvcache_blocks": ("num_gpu_blocks_override", lambda number: None if number == -1 else number),
}


def accepted_options(given: dict[str, Any], cls: Any) -> dict[str, Any]:
    """What is given to a class of options (checks/names.py), under our names. Raises ValueError as accepted() does."""
    what = next((base.__name__ for base in cls.__mro__ if base.__name__ in TABLES), "LLM")
    known = cls.__dataclass_fields__
    return accepted(in_our_words(given, known), known, what)


def in_our_words(given: dict[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Options under our names. ValueError where two names of one option say different things."""
    for name, (ours, converted) in RENAMED.items():
        if ours not in known or name not in given:
            continue
        if (value := given.pop(name)) is None:
            continue
        value = converted(value)
        if ours in given and given[ours] != value:
            raise ValueError(f"{name} and {ours} are two names of one option; leave one of them out")
        given[ours] = value
    return given


def accepted(given: Mapping[str, Any], known: Iterable[str], what: str) -> dict[str, Any]:
    """What `given` asks of `what`, one of TABLES: without what asks for nothing.

    ValueError for an option at a value that we cannot honour, and for a name that nobody knows.
    """
    known, table = list(known), TABLES[what]
    reject_unknown((name for name in given if name not in table), known, what)
    for name in table.keys() & given.keys() - set(known):
        reason, neutral = table[name]
        value = given[name]
        if value is not None and ANY not in neutral and not any(_same(value, n) for n in neutral):
            works = " or ".join(f"{name}={n!r}" for n in neutral if n is not None)
            fine = f"Leave it out{f' or say {works}' if works else ''}"
            raise ValueError(f"{what}: {name}={shorten(value)} asks for {reason}; this engine does not do that. {fine}")
    return {name: value for name, value in given.items() if name in known}


def _same(value: Any, neutral: Any) -> bool:
    value = getattr(value, "value", value)  # of an Enum
    return type(value) is type(neutral) and value == neutral
