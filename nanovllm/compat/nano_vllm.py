"""What scripts written for nano-vllm (github.com/GeeeekExplorer/nano-vllm) say, where vLLM's say it otherwise.

Data alone: paths.py, refused.py and names.py read it by the rules that they have for vLLM's names.
examples/move_to_vllm.md says what else differs.
"""

from nanovllm.compat.options import Table, asks

PATHS = {  # a module of nano-vllm -> the one here that has the same classes under the same names
    "nanovllm.engine.block_manager": "nanovllm.core.block_manager",
    "nanovllm.engine.model_runner": "nanovllm.worker.model_runner",
    "nanovllm.engine.scheduler": "nanovllm.core.scheduler",
    "nanovllm.engine.sequence": "nanovllm.core.sequence",
    "nanovllm.utils.loader": "nanovllm.worker.loader",
}
CLASSES = {  # a module of nano-vllm -> its classes that have a counterpart here -> where that is
    "nanovllm.layers.layernorm": {"RMSNorm": ("nanovllm.worker.layers", "RMSNorm")},
    "nanovllm.layers.linear": {
        "LinearBase": ("nanovllm.worker.layers", "Linear"),
        "ReplicatedLinear": ("nanovllm.worker.layers", "Linear"),
        "RowParallelLinear": ("nanovllm.features.parallel.parallel_layers", "RowParallelLinear"),
    },
    "nanovllm.layers.rotary_embedding": {"RotaryEmbedding": ("nanovllm.worker.layers", "RotaryEmbedding")},
    "nanovllm.models.qwen3": {
        "Qwen3Attention": ("nanovllm.worker.model", "Attention"),
        "Qwen3DecoderLayer": ("nanovllm.worker.model", "DecoderLayer"),
        "Qwen3ForCausalLM": ("nanovllm.worker.model", "Decoder"),
        "Qwen3MLP": ("nanovllm.worker.layers", "MLP"),
        "Qwen3Model": ("nanovllm.worker.model", "Decoder"),
    },
}
REFUSED = {  # a module, or a name in one -> where the thing is here
    "layers": "the layers are in nanovllm/worker/layers.py and model.py",
    "layers.activation": "it is a function, silu_and_mul in nanovllm/worker/kernels.py",
    "layers.attention": "attention is two functions: rotary_and_write in nanovllm/worker/kernels.py writes K and V, "
    "paged_attention in nanovllm/worker/attention.py reads them; the layer is Attention in nanovllm/worker/model.py",
    "layers.embed_head": "the embedding and the output head are embed() and logits() of Decoder in "
    "nanovllm/worker/model.py; ParallelDecoder in nanovllm/features/parallel/parallel_layers.py splits them over ranks",
    "layers.linear": "Linear in nanovllm/worker/layers.py merges projections (out_sizes), and a rank's is one of "
    "smaller sizes; nanovllm/features/parallel/ cuts a rank's share out of the checkpoint",
    "layers.rotary_embedding": "it is a function, rotate in nanovllm/worker/kernels.py; "
    "a ModelRunner makes its one RotaryEmbedding",
    "layers.sampler": "it is a function, sample in nanovllm/worker/sampler.py; "
    "what the rows of a step ask for is a SamplingBatch",
    "models.qwen3": "one decoder serves all architectures: nanovllm/worker/model.py",
    "utils.context": "there is no global context: a step's arrays are a Batch (nanovllm/worker/batch.py), "
    "which a layer gets in its ForwardContext (nanovllm/worker/layers.py)",
    "utils.loader": "weights come into place in load_model, in nanovllm/worker/loader.py",
}
METHODS = {  # of LLM, which is an LLMEngine there -> what to do instead
    "exit": "memory is given back, and ranks end, when the LLM is deleted or the process ends",
    "is_finished": "llm.engine.has_unfinished_requests() is its opposite",
    **dict.fromkeys(
        ("step", "scheduler", "model_runner", "tokenizer"), "it is of llm.engine, and step() returns RequestOutputs"
    ),
}
OPTIONS: Table = {
    **asks("another config.json than the checkpoint's (ours: `hf_overrides`)", hf_config=None),
    **asks("another end of sequence than the checkpoint's (ours: SamplingParams(stop_token_ids=[...]))", eos=-1),
}
