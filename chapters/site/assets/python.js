// Python in a worker, as lab.js and exercises.js use it: asked one thing at a time, and ended whatever it does.

const FOLDER = new URL("../runtime/", import.meta.url).href;

// What a worker starts from. The page loads it once and keeps it: any number start from it, without a network, too.
let runtime = null;

export class Python {
  printed = () => {}; // gets the text that Python printed
  worker = null;
  waiting = new Map();
  lastId = 0;

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
  const kept = await cacheOf("nanovllm-python");
  const worker = await (await newest(new URL("worker.js", import.meta.url), kept)).blob();
  const blobs = await loadFiles(FOLDER, kept, progress);
  const files = {};
  let module;
  for (const [name, blob] of Object.entries(blobs)) {
    if (name.endsWith(".wasm")) module = await WebAssembly.compile(await blob.arrayBuffer());
    else files[name] = URL.createObjectURL(blob);
  }
  return { worker: URL.createObjectURL(worker), files, module };
}

// None on a page that came without TLS from another machine, nor where a browser forbids to keep anything.
export async function cacheOf(name) {
  try {
    return await self.caches?.open(name);
  } catch {
    return undefined;
  }
}

// The files that a folder's manifest names, as blobs: from where they are kept, or from the site. progress: in bytes.
export async function loadFiles(folder, kept, progress) {
  const manifest = await (await newest(new URL("manifest.json", folder), kept)).json();
  const total = Object.values(manifest).reduce((sum, file) => sum + file.size, 0);
  let loaded = 0;
  const count = (bytes) => progress((loaded += bytes), total);
  const blobs = {}, wanted = new Set();
  await Promise.all(Object.entries(manifest).map(async ([name, { url, integrity, size }]) => {
    const address = new URL(`${url}?${encodeURIComponent(integrity)}`, folder); // another file has another address
    const found = await kept?.match(address);
    wanted.add(address.href);
    blobs[name] = found ? await found.blob() : await download(address, integrity, count);
    if (found) count(size);
    else await kept?.put(address, new Response(blobs[name])).catch(() => {}); // no room: it is fetched again next time
  }));
  for (const { url } of (await kept?.keys()) ?? []) if (url.includes("?") && !wanted.has(url)) await kept.delete(url);
  return blobs;
}

// What the site has now; without a network, what is kept.
async function newest(url, kept) {
  try {
    const response = await fetched(url, { cache: "no-cache" });
    await kept?.put(url, response.clone()).catch(() => {});
    return response;
  } catch (error) {
    const found = await kept?.match(url);
    if (!found) throw error;
    return found;
  }
}

// For a message: without the folders and the hash.
const shortened = ({ host, pathname }) => `${host}/…/${pathname.split("/").at(-1)}`;

async function fetched(url, options) {
  const response = await fetch(url, options).catch((error) => {
    throw new Error(filled(WORDS.not_loaded, { url: shortened(url), reason: error.message }));
  });
  if (!response.ok) throw new Error(filled(WORDS.not_found, { url: shortened(url), reason: `${response.status} ${response.statusText}` }));
  return response;
}

async function download(url, integrity, count) {
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
    throw new Error(filled(WORDS.other_file, { url: shortened(url) }));
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
      if (loaded < total) bar.value = loaded;
      else bar.removeAttribute("value"); // it moves, since nobody knows how far Python is
      const [done, all] = [loaded, total].map((bytes) => (bytes / 1e6).toFixed(1));
      text.textContent = filled(loaded >= total ? WORDS.starting : WORDS.loaded, { done, total: all });
    },
    end() { box.hidden = true; },
    fail(error) { box.hidden = true; failure.hidden = false; failure.textContent = error.message; },
  };
}
