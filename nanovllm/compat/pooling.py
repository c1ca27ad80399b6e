"""vLLM's rarer options of pooling, by the rule of names.py: what asks for nothing is taken."""

from nanovllm.compat.options import Table, anything, asks

POOLING: Table = {
    **anything("requires_token_ids"),
    **asks("normalization by its old name (`use_activation`)", normalize=None, softmax=None, activation=None),
    **asks("a score of each step", step_tag_id=None, returned_token_ids=None),
    **asks("a request that leaves the prefix cache alone", skip_reading_prefix_cache=False),
    **asks("a score of each pair of tokens", late_interaction_params=None),
    **asks("arguments of plugins", extra_kwargs={}),
    **asks("outputs before the end", output_kind=(2,)),  # RequestOutputKind.FINAL_ONLY
}
POOLER: Table = {
    **anything("enable_flash_late_interaction"),
    **asks("normalization by its old name (`use_activation`)", normalize=None, softmax=None, activation=None),
    **asks("a vector of each token", tok_pooling_type=("ALL",)),
    **asks("texts in pieces", enable_chunked_processing=False, max_embed_len=None),
    **asks("scores that are shifted and scaled", logit_mean=None, logit_sigma=None),
    **asks("a score of each step", step_tag_id=None, returned_token_ids=None),
}
TOKENIZATION: Table = {
    **asks("tokens that stand for nothing", padding=(False, "do_not_pad"), pad_prompt_tokens=None),
    **asks("truncation by the tokenizer (ours: truncate_prompt_tokens)", truncation=False, max_length=None),
    **asks("another text", do_lower_case=False),
}
POOLING_BODY: Table = {  # of /v1/embeddings, /rerank, /score and /pooling
    **anything("user mm_processor_kwargs media_io_kwargs"),
    **asks("another order than first come, first served", priority=0),
    **asks("tokens that stand for nothing", padding="do_not_pad"),
    **asks("normalization by its old name (`use_activation`)", normalize=None, softmax=None, activation=None),
    **asks("numbers of another kind than float32", embed_dtype="float32", endianness=("native", "little")),
    **asks("a chat (write it as a text: POST /tokenize shows how its template would)", messages=[]),
}
TABLES = {
    "PoolingParams": POOLING,
    "body of an embedding": POOLING_BODY,
    "PoolerConfig": POOLER,
    "tokenization_kwargs": TOKENIZATION,
}
