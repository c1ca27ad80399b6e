// The page's kernels in Node, for tests: a model's folder; then a line of JSON in, a line of JSON out.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const folder = process.argv[2], file = (name) => readFileSync(`${folder}/${name}`);
const { loadModel } = await import(pathToFileURL(`${folder}/kernels.js`));
const model = await loadModel({
  tokenizers: pathToFileURL(`${folder}/tokenizers.min.mjs`).href,
  program: await WebAssembly.compile(file("program.wasm")),
  weights: file("weights.bin"),
  ...Object.fromEntries(["layout", "tokenizer", "tokenizer_config"].map((name) => [name, file(`${name}.json`).toString()])),
});
for await (const line of createInterface({ input: process.stdin })) {
  const [what, ...args] = JSON.parse(line);
  console.log(JSON.stringify(model[what](...args)));
}
