"""Wrong solutions of the eight steps of chapters/nano_engine."""

from tests.course.wrong_solutions import edits

WRONG = edits(
    r"""
Sequence
    one_block_too_many: a full last block needs no
        ~ cdiv(len(self.tokens), self.block_size) => len(self.tokens) // self.block_size + 1
    slot_is_position: the table says which block holds
        ~ return block_id * self.block_size + position % self.block_size => return position
    block_without_offset: a block's slots lie side by side
        ~  + position % self.block_size =>
    counts_the_prompt: max_tokens counts generated tokens
        ~ len(self.generated) >= => len(self.tokens) >=
    eos_of_the_prompt: it was not generated
        ~ bool(self.generated) and  =>
    forgets_ignore_eos: ignore_eos: an EOS token is one like any other
        ~  and not self.params.ignore_eos =>
BlockManager
    without_parent: equal tokens have other K/V elsewhere
        ~ parent_hash + b => b
    low_bytes: token ids go far beyond 255
        ~ token.to_bytes(4, "little") => bytes([token % 256])
    as_text: where one token ends
        ~ b"".join(token.to_bytes(4, "little") for token in token_ids) => "".join(map(str, token_ids)).encode()
    nothing_left: leave its block out of the hits
        ~ (len(seq.tokens) - 1) // self.block_size => len(seq.tokens) // self.block_size
    hits_stay_in_the_queue: a hit that lay in the queue must leave it
        ~ self.free_blocks.pop(block.block_id, None) => pass
    counts_hits_twice: the hits are 2 of the 4
        ~ sum(block.ref_count == 0 for block in hits) => 0
    stays_findable: the first text is still found
        ~ del self.hash_to_block[block.block_hash] => pass
    first_block_first: the last block first
        ~ reversed(seq.block_table) => seq.block_table
    forgets_when_freed: are still cached
        - self.free_blocks[block_id] = block
        + self.free_blocks[block_id] = block
        + self.hash_to_block.pop(block.block_hash, None)
        + block.block_hash = None
    registers_what_is_not_computed: only that may be found
        ~ seq.num_computed // self.block_size)): => len(seq.tokens) // self.block_size)):
    the_last_copy_is_found: must still be found under their hash
        ~  and block_hash not in self.hash_to_block =>
    never_unshares: ref_counts: how many tables a block is in
        ~ block.ref_count -= 1 => block.ref_count = 0
    grows_at_every_token: the table after append_slots(seq, 4)
        ~ cdiv(num_tokens, self.block_size) - len(seq.block_table) => 1
    what_it_grows_by_stays_findable: was a hit, and holds another text
        - self.take_fresh(seq, num_fresh)
        - return True
        + for _ in range(num_fresh):
        +     block_id, block = self.free_blocks.popitem(last=False)
        +     block.ref_count = 1
        +     seq.block_table.append(block_id)
        + return True
    hashes_anew: at most 3 calls of hash_block()
        ~ known = seq.block_hashes => known = seq.block_hashes = []
Scheduler
    prompts_first: running sequences come first
        ~ for seq in list(self.running): => for seq in list(self.running) if not self.waiting else ():
    never_spends_the_budget: the prompt what is left
        ~ return chunk.end - chunk.start => return 0
    registers_later: register these when the chunk is scheduled
        ~ self.manager.register(chunk.seq) => pass
    the_first_gives_way: 2, the last of running
        ~ victim = self.running.pop() => victim = self.running.pop(0)
    to_the_end_of_the_queue: is preempted and waits before 3
        ~ self.waiting.appendleft(victim) => self.waiting.append(victim)
    keeps_the_blocks: gives its blocks back
        ~ self.manager.free(seq) => pass
    passes_who_waits: waits, and so does 3
        - if not self.manager.allocate(seq):
        -     break
        + if not self.manager.allocate(seq):
        +     self.waiting.rotate(-1)
        +     seq = self.waiting[0]
        +     if not self.manager.allocate(seq):
        +         break
    too_many_seats: max_num_seqs is 2
        ~  and len(self.running) < self.max_num_seqs =>
make_batch
    positions_begin_anew: goes on where the chunk before ended
        ~ positions += range(chunk.start, chunk.end) => positions += range(chunk.end - chunk.start)
    keys_of_this_chunk_only: also those that earlier steps
        ~ chunk.end for chunk in chunks] => chunk.end - chunk.start for chunk in chunks]
    row_after_the_last: logits_rows: the last row
        ~ logits_rows.append(len(input_ids) - 1) => logits_rows.append(len(input_ids))
    logits_of_all: inside a prompt has none
        ~ if chunk.reaches_end: => if chunk:
    floats: indexes are int64, even if there are none
        ~ , dtype=torch.int64 =>
Llama
    subtracts_the_mean: the mean of the row is not subtracted
        ~ mean_square = x.pow(2) => mean_square = (x - x.mean(-1, keepdim=True)).pow(2)
    eps_after_the_root: eps is added before the root
        ~ torch.rsqrt(mean_square + self.eps) => 1 / (mean_square.sqrt() + self.eps)
    half_the_angles: angle i is position
        ~ dtype=torch.float32) / head_dim => dtype=torch.float32) / (2 * head_dim)
    turns_backwards: (a, b) becomes (a cos - b sin
        - first * cos - second * sin, second * cos + first * sin
        + first * cos + second * sin, second * cos - first * sin
    neighbours_are_pairs: numbers i and i + 8 are a pair
        ~ x.chunk(2, dim=-1) => x[..., ::2], x[..., 1::2]
    sees_the_future: row i sees keys 0 to i
        ~ , attn_mask=sees =>
    rows_count_from_0: found through the table
        ~ batch.positions[rows, None] => torch.arange(starts[b + 1] - starts[b])[:, None]
    blocks_in_their_order: found through the table
        ~ k_cache[table] => k_cache[table.sort().values]
    heads_alternate: Query heads 0 and 1 share
        ~ q[rows].transpose(0, 1) => q[rows].transpose(0, 1)[[0, 2, 1, 3]]
    gate_and_up_swapped: gate has the first half
        ~ gate, up = self => up, gate = self
    head_of_its_own: too many
        ~ if config.tie_word_embeddings: => if False:
    no_residual: the logits of the last row
        ~ return x + self.mlp => return self.mlp
    unrotated_keys: the logits of the last row
        ~ rotate(q, cos, sin), rotate(k, cos, sin) => rotate(q, cos, sin), k
    writes_into_a_copy: the logits of the last row
        ~ k_cache.view(-1, *k.shape[1:]) => k_cache.flatten(0, 1).clone()
load_weights
    k_before_q: is model.layers.1.self_attn.q_proj.weight
        ~ ("q_proj", "k_proj", "v_proj") => ("k_proj", "q_proj", "v_proj")
    up_before_gate: is model.layers.2.mlp.gate_proj.weight
        ~ ("gate_proj", "up_proj") => ("up_proj", "gate_proj")
    the_first_file_only: KeyError
        ~ sorted(directory.glob("*.safetensors")) => sorted(directory.glob("*.safetensors"))[:1]
    takes_their_dtype: are float32
        ~ parameter.data.copy_( => parameter.data = (
    leaves_out_what_is_missing: says nothing
        ~ tensors[each] for each in stored_names] => tensors.get(each, torch.zeros(96, 64)) for each in stored_names]
sample
    always_the_same_number: the place must matter
        ~ f"{seq.params.seed},{len(seq.generated)}" => f"{seq.params.seed}"
    without_a_seed: the seed must matter
        ~ f"{seq.params.seed},{len(seq.generated)}" => f"{len(seq.generated)}"
    shifted: Has seed 4, place 5
        ~ f"{seq.params.seed},{len(seq.generated)}" => str(seq.params.seed + len(seq.generated))
    of_the_prompt: not on the prompt
        ~ f"{seq.params.seed},{len(seq.generated)}" => f"{seq.params.seed},{len(seq.tokens)}"
    temperature_after_softmax: before softmax
        - (logits[row].double() / seq.params.temperature).softmax(-1)
        + (logits[row].double().softmax(-1) / seq.params.temperature)
    multiplies: logits are divided
        ~ / seq.params.temperature => * seq.params.temperature
    global_generator: other tokens together than each alone
        ~ noise(seq) * shares[-1] => torch.rand(()) * shares[-1]
    no_token_is_left: there must be a token
        ~ noise(seq) * shares[-1] => noise(seq)
    always_greedy: how often tokens
        ~ if seq.params.temperature > 0: => if False:
LLM
    one_by_one: queue all of them
        - seqs = [self.make_sequence(prompt, params) for prompt in prompts]
        - for seq in seqs:
        -     self.scheduler.add(seq)
        - while self.scheduler.has_unfinished():
        -     self.step()
        + seqs = []
        + for prompt in prompts:
        +     seqs.append(self.add_request(prompt, params))
        +     while self.scheduler.has_unfinished():
        +         self.step()
    in_the_order_of_their_ends: in the order of the prompts
        - while self.scheduler.has_unfinished():
        -     self.step()
        + seqs.clear()
        + while self.scheduler.has_unfinished():
        +     seqs += self.step()
    text_with_the_prompt: without the prompt
        ~ self.tokenizer.decode(seq.generated), "token_ids" => self.tokenizer.decode(seq.tokens), "token_ids"
    without_eos: the answer goes on
        ~ , config.eos_token_ids) => )
    takes_anything: must raise ValueError
        ~ if not token_ids or len(token_ids) + params.max_tokens > num_slots: => if False:
    leaves_a_slot_free: fit into 16 slots
        ~ + params.max_tokens > num_slots => + params.max_tokens >= num_slots
    one_layers_cache: different tokens
        - torch.zeros(config.num_hidden_layers, 2, *kv_shape)
        + torch.zeros(1, 2, *kv_shape).expand(config.num_hidden_layers, -1, -1, -1, -1, -1)
"""
)
