"""What vLLM's scripts import or call and this engine has not, by name and reason. What it has: paths.py.

The same of nano-vllm's scripts is in nano_vllm.py.
"""

from nanovllm.compat import nano_vllm
from nanovllm.compat.options import WEIGHTS


class NameRefused(ImportError, ValueError):
    """Raised where a script imports what vLLM or nano-vllm has and this engine has not. It says why."""


class MethodRefused(AttributeError, ValueError):
    """The same, where a script asks an object for a method or an attribute."""


def _refuse(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


# A module and all that is below it, or a name in a module -> why it is not here. The longest one that fits is taken.
REFUSED: dict[str, str] = {
    **_refuse(
        "input is text: there are no images, sounds, videos, embeddings or encoders",
        """assets multimodal connections entrypoints.speech_to_text inputs.EmbedsPrompt inputs.MultiModalDataDict
        inputs.MultiModalDataBuiltins inputs.MultiModalUUIDDict inputs.MultiModalInput inputs.mm_input
        inputs.ExplicitEncoderDecoderPrompt inputs.build_explicit_enc_dec_prompt inputs.zip_enc_dec_prompts
        inputs.data.ExplicitEncoderDecoderPrompt inputs.StreamingInput engine.protocol.StreamingInput""",
    ),
    **_refuse(
        "pooling is LLM.embed(), score(), classify() and encode(), and the server's --runner pooling",
        "config.pooler entrypoints.pooling entrypoints.score_utils",
    ),
    **_refuse("options are arguments of LLM or EngineArgs, and plain dicts where they have parts", "config"),
    **_refuse(
        "there is no KV cache shared with other engines, no expert parallelism and no transfer of weights",
        "distributed config.kv_transfer config.KVTransferConfig config.WeightTransferConfig",
    ),
    **_refuse(
        "models are nanovllm/worker/model.py and what it loads; there is no registry, and no loader to choose",
        "ModelRegistry model_executor models model_inspection",
    ),
    **_refuse(
        "functions come with SamplingParams(logits_processors=[...]), classes with LLM(logits_processors=[...])",
        "v1.sample logits_process",
    ),
    **_refuse(
        "one process steps the engine; tensor_parallel_size starts ranks by itself, without Ray",
        "initialize_ray_cluster ray executor v1.executor worker.worker worker.worker_base v1.worker v1.pool",
    ),
    **_refuse("the counters are LLM.get_metrics() and the server's /metrics", "v1.metrics usage tracing"),
    **_refuse("nanovllm bench measures; a data set is a file of your own", "benchmarks"),
    **_refuse("the server is `nanovllm serve` and its parts are in nanovllm.serving", "entrypoints"),
    **_refuse(
        "generate() takes text, token ids or a dict; chat_prompt() shows what a template makes of a conversation",
        "renderers inputs.engine inputs.parse inputs.preprocess inputs.tokens_input inputs.EngineInput",
    ),
    **_refuse(
        "answers are read by the server, by the format that the chat template has", "tool_parsers reasoning parser"
    ),
    **_refuse("a profile is start_profile() and stop_profile(), or examples/profile_step.py", "profiler"),
    **_refuse(f"transformers has it, and loads without this engine; here {WEIGHTS}", "transformers_utils.config"),
    **_refuse("the environment has none of vLLM's switches: options are arguments", "envs env_override"),
    **_refuse("plugins are not loaded", "plugins"),
    **_refuse("its newer name is StructuredOutputsParams", "sampling_params.GuidedDecodingParams"),
    **_refuse("answers do not end at a repetition", "sampling_params.RepetitionDetectionParams"),
    **_refuse(
        "it is an inner part of vLLM; nanovllm/README.md says where the same thing happens here",
        """_C _custom_ops _aiter_ops attention collect_env compilation cute_utils device_allocator
        distributed.parallel_state engine entrypoints.utils forward_context inputs ir kernels logging_utils
        platforms scalar_type sequence snapshot spec_decode tasks third_party tokenizers
        transformers_utils triton_utils utils v1 vllm_flash_attn prompt_adapter
        outputs.RequestError outputs.SamplingMask outputs.WeightVersionSpan outputs.STREAM_FINISHED
        sampling_params.SamplingType sampling_params.ThinkingTokenBudget""",
    ),
}


def refusal(name: str) -> str | None:
    """Whose `name` is, a dotted path without the package's name, and why it is not here. None: it is nobody's."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        for whose, refused in (("vLLM", REFUSED), ("nano-vllm", nano_vllm.REFUSED)):
            if prefix in refused:
                return f"{name} is {whose}'s, and not here: {refused[prefix]}"
    return None


METHODS = {  # of LLM, LLMEngine and AsyncLLM -> why they have not, or what to call instead
    **_refuse("classify() gives a classifier's numbers, and PoolingParams(use_activation=False) its logits", "reward"),
    **_refuse("memory is given back by deleting the LLM", "sleep wake_up is_sleeping release_kv_cache_memory"),
    **_refuse("the weights are in llm.engine.model_runner.model", "collective_rpc apply_model"),
    **_refuse(
        "weights stay as they were loaded; build another LLM for others",
        """init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update start_draft_weight_update
        update_weights finish_weight_update update_weight_version get_weight_version set_weight_version
        compute_weight_checksums checkpoint_prepare checkpoint_restore""",
    ),
    **_refuse("chat_prompt() shows what a template makes of a conversation", "renderer"),
    **_refuse("options are in `engine.config`; the engine runs in this process", "vllm_config engine_core"),
    **_refuse("enqueue() takes what chat_prompt() makes of a conversation", "enqueue_chat"),
    **_refuse("it is the option tensor_parallel_size", "get_world_size"),
    **_refuse("input is text: nothing else is cached", "reset_mm_cache reset_encoder_cache"),
    **_refuse("options are EngineArgs, and the task is to generate", "from_vllm_config get_supported_tasks"),
    **_refuse("get_metrics() has the counters", "do_log_stats do_log_stats_with_interval"),
    **_refuse("generate() queues a request and gives its outputs", "add_request"),
    **_refuse("generate() raises Overloaded where max_waiting sequences wait; stats() counts them", "check_admission"),
    **_refuse("stats() has what waits and what runs", "get_num_queued_tokens"),
    **_refuse(
        "one machine, one engine",
        """get_status handle_fault scale_elastic_ep get_kv_event_sources has_unfinished_requests_dp
        notify_kv_transfer_request_rejected""",
    ),
}


def refused_method(cls: type, name: str) -> AttributeError:
    """What a class raises, in __getattr__, for a name that it does not have."""
    for whose, methods in (("vLLM", METHODS), ("nano-vllm", nano_vllm.METHODS)):
        if name in methods:
            return MethodRefused(f"{cls.__name__} has no {name}, as {whose}'s does: {methods[name]}")
    return AttributeError(f"{cls.__name__} has no {name!r}")
