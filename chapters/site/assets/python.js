// Python in a worker, as lab.js and exercises.js use it: asked one thing at a time, and ended whatever it does.

const FOLDER = new URL("../runtime/", import.meta.url).href;

// What a worker starts from. The page loads it once and keeps it: any number start from it, without a network, too.
let runtime = null;

export class Python {
  // printed(text): what Python printed.
  constructor({ printed = () => {} } = {}) {
    Object.assign(this, { printed, worker: null, waiting: new Map(), lastId: 0 });
  }

  // progress(loaded, total) in bytes.
  async start(progress = () => {}) {
    runtime ??= load(progress);
    const { worker, ...held } = await runtime.catch((error) => {
      runtime = null; // next time it is tried again
      throw error;
    });
    this.worker = new Worker(worker, { type: "module" });
    this.worker.onmessage = ({ data }) => this.receive(data);
    this.worker.onerror = (event) => this.end(event.message || WORDS.no_worker);
    const { snapshot } = await this.call({ do: "start", folder: FOLDER, ...held });
    (await runtime).snapshot ??= snapshot;
  }

  call(request, began = () => {}) {
    const id = ++this.lastId;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject, began });
      this.worker.postMessage({ id, request });
    });
  }

  receive({ id, result, failure, began, printed }) {
    if (printed !== undefined) return this.printed(printed);
    const waiting = this.waiting.get(id);
    if (began !== undefined) return waiting?.began(began);
    this.waiting.delete(id);
    if (failure !== undefined) waiting?.reject(new Error(failure));
    else waiting?.resolve(result);
  }

  // Whatever it is doing, it stops. Who waits for it is told why.
  end(why) {
    this.worker?.terminate();
    this.worker = null;
    this.printed = () => {}; // what is still on its way
    for (const { reject } of this.waiting.values()) reject(new Error(why));
    this.waiting.clear();
  }
}

async function load(progress) {
  const manifest = await (await fetched(new URL("manifest.json", FOLDER), { cache: "no-cache" })).json();
  const worker = await (await fetched(new URL("worker.js", import.meta.url))).blob();
  const total = Object.values(manifest).reduce((sum, file) => sum + file.size, 0);
  let loaded = 0;
  const count = (bytes) => progress((loaded += bytes), total);
  const files = {};
  let module;
  await Promise.all(Object.entries(manifest).map(async ([name, file]) => {
    const blob = await download(new URL(file.url, FOLDER), file.integrity, count);
    if (name.endsWith(".wasm")) module = await WebAssembly.compile(await blob.arrayBuffer());
    else files[name] = URL.createObjectURL(blob);
  }));
  return { worker: URL.createObjectURL(worker), files, module };
}

export async function fetched(url, options) {
  const response = await fetch(url, options).catch((error) => {
    throw new Error(filled(WORDS.not_loaded, { url, reason: error.message }));
  });
  if (!response.ok) throw new Error(filled(WORDS.not_found, { url, reason: `${response.status} ${response.statusText}` }));
  return response;
}

export async function download(url, integrity, count) {
  const reader = (await fetched(url)).body.getReader();
  const chunks = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    chunks.push(value);
    count(value.length);
  }
  const blob = new Blob(chunks, { type: "text/javascript" }); // of the others nobody asks the type
  const address = URL.createObjectURL(blob);
  // The browser compares the hash. Not on the first fetch, which would then show no progress.
  await fetch(address, { integrity }).catch(() => {
    throw new Error(filled(WORDS.other_file, { url }));
  });
  URL.revokeObjectURL(address);
  return blob;
}

// The progress bar of a section, and where its failures are shown.
export function loadingBar(section) {
  const box = section.querySelector(".loading"), bar = box.querySelector("progress"), text = box.querySelector(".loaded");
  const failure = section.querySelector(".failure");
  return {
    begin() { box.hidden = false; failure.hidden = true; text.textContent = ""; bar.value = 0; },
    progress(loaded, total) {
      bar.max = total;
      bar.value = loaded;
      const [done, all] = [loaded, total].map((bytes) => (bytes / 1e6).toFixed(1));
      text.textContent = filled(loaded >= total ? WORDS.starting : WORDS.loaded, { done, total: all });
    },
    end() { box.hidden = true; },
    fail(error) { box.hidden = true; failure.hidden = false; failure.textContent = error.message; },
  };
}
