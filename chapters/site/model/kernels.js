// The engine's C kernels in WebAssembly: a step is replayed as image.py has written it down. Runs in a worker, and in Node.

// All that a page's Python asks, as text. tokenizers: the address of npm's module. layout, tokenizer, tokenizer_config: JSON.
export async function loadModel({ tokenizers, program, weights, layout, tokenizer, tokenizer_config }) {
  const { Tokenizer } = await import(tokenizers);
  const words = new Tokenizer(JSON.parse(tokenizer), JSON.parse(tokenizer_config));
  const step = await loadKernels(program, JSON.parse(layout), weights);
  return {
    layout,
    step: (request) => JSON.stringify(step(JSON.parse(request))),
    encode: (text) => JSON.stringify(words.encode(text).ids),
    decode: (ids) => words.decode(JSON.parse(ids), { skip_special_tokens: false, clean_up_tokenization_spaces: false }),
  };
}

const CALL_BYTES = 16; // of a recorded_call of cpu/replay.c: two pointers, one number

// program: compiled WebAssembly; weights: bytes.
async function loadKernels(program, layout, weights) {
  const { exports } = await WebAssembly.instantiate(program, {});
  const memory = exports.memory, functions = exports.__indirect_function_table;
  if (exports.__heap_base.value > layout.base) throw new Error("the program is larger than the image leaves room for");
  memory.grow(Math.ceil((layout.end - memory.buffer.byteLength) / 65_536));
  new Uint8Array(memory.buffer).set(weights, layout.start);
  const first = functions.grow(layout.functions.length);
  layout.functions.forEach((name, i) => functions.set(first + i, exports[name]));
  const pointers = new Uint32Array(memory.buffer), numbers = new BigInt64Array(memory.buffer);
  const halves = new Uint16Array(memory.buffer);
  for (const [calls, count] of [[layout.calls, layout.num_calls], [layout.finish, layout.num_finish]])
    for (let i = 0; i < count; i++) pointers[(calls + CALL_BYTES * i) / 4] += first; // an index of the table is a function's address

  const put = (address, values) => values.forEach((value, i) => (numbers[address / 8 + i] = BigInt(value)));
  const replay = (calls, from, to, numRows) => exports.replay(calls + CALL_BYTES * from, BigInt(to - from), BigInt(numRows));
  const word = new Uint32Array(1), float = new Float32Array(word.buffer);
  const asFloat = (bf16) => { // the upper half of a float32
    word[0] = bf16 << 16;
    return float[0];
  };
  const floats = new Float32Array(memory.buffer);
  const asFloats = (address, count) => Array.from(halves.subarray(address / 2, address / 2 + count), asFloat);

  // inputs: token ids, positions, slots, rows with logits. table: block ids. tasks: attention_task of cpu/attention.h.
  // watch: a layer whose attention is wanted. logits: which of the rows with logits are wanted whole.
  function step({ inputs, table, tasks, watch = null, logits = [] }) {
    inputs.forEach((values, i) => put(layout.inputs + 8 * layout.max_rows * i, values));
    pointers.set(table, layout.tables / 4);
    put(layout.tasks, tasks.flat());
    pointers.set([layout.tables, layout.tasks, 0], layout.step / 4);
    put(layout.step + 16, [layout.table_width, tasks.length, 1, Math.max(...tasks.map((task) => task[1]))]);
    const numRows = inputs[0].length, numResults = inputs[3].length;
    if (layout.looked_up)
      exports.look_up(layout.looked_up, layout.table, layout.inputs, BigInt(numRows), BigInt(layout.hidden_size));
    const watched = layout.layers[watch], pause = watched ? watched.num_calls : 0;
    replay(layout.calls, 0, pause, numRows);
    const attention = watched ? attentionWeights(watched, numRows - 1, table, inputs[1].at(-1) + 1) : [];
    replay(layout.calls, pause, layout.num_calls, numRows);
    replay(layout.finish, 0, layout.num_finish, numResults);
    if (numResults) {
      put(layout.choice, [numResults]);
      pointers.set([layout.token_ids, layout.logits], layout.choice / 4 + 2);
      put(layout.choice + 16, [layout.vocab_size]);
      exports.most_likely(layout.choice);
    }
    const chosen = Array.from(inputs[3], (_, i) => Number(numbers[layout.token_ids / 8 + i]));
    const rowAt = (row) => layout.logits / 4 + row * layout.vocab_size;
    const rows = logits.map((row) => Array.from(floats.subarray(rowAt(row), rowAt(row) + layout.vocab_size)));
    return { chosen, attention, logits: rows };
  }

  // What each head of a row pays to each key: softmax(q k / sqrt(head_dim)). For pictures; the step computes its own.
  function attentionWeights({ q, q_stride, k_cache, block_stride }, row, table, numKeys) {
    const { head_dim: dim, block_size: size, num_attention_heads: numHeads, num_key_value_heads: numKvHeads } = layout;
    return Array.from({ length: numHeads }, (_, head) => {
      const query = asFloats(q + 2 * (row * q_stride + head * dim), dim);
      const kvHead = Math.floor(head / (numHeads / numKvHeads));
      const scores = Array.from({ length: numKeys }, (_, t) => { // a key lies in a column: cpu/kv_cache.h
        const at = k_cache / 2 + table[Math.floor(t / size)] * block_stride + kvHead * size * dim + t % size;
        let score = 0;
        for (let d = 0; d < dim; d++) score += query[d] * asFloat(halves[at + d * size]);
        return score / Math.sqrt(dim);
      });
      const largest = Math.max(...scores), weights = scores.map((score) => Math.exp(score - largest));
      const total = weights.reduce((sum, weight) => sum + weight, 0);
      return weights.map((weight) => weight / total);
    });
  }

  return step;
}
