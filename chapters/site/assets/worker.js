// The worker: Python and the course's own files, away from the page, so that an endless loop cannot freeze it.

const MOST_LINES = 500, MOST_CHARACTERS = 20_000, MOST_IN_A_LINE = 1_000; // of what the code prints
const MOST_MEMORY = 512 * 2 ** 20; // more is a MemoryError in Python, and not the end of the page

let python, browser; // Pyodide, and the Python object of browser.py

// From the page: files (addresses of blobs, by name) and Pyodide's WebAssembly, compiled. snapshot: the memory of a Python
// that has started and run nothing. The first worker makes it; it spares the others most of their start.
async function start({ folder, files, module, snapshot }) {
  const originalFetch = self.fetch;
  self.fetch = (url, options) => // Pyodide asks for this one by its name, in a folder; it is compiled already
    String(url).endsWith("/pyodide.asm.wasm") ? Promise.resolve() : originalFetch(url, options);
  WebAssembly.instantiateStreaming = async (_, imports) => ({ module, instance: await WebAssembly.instantiate(module, imports) });
  const grow = WebAssembly.Memory.prototype.grow;
  WebAssembly.Memory.prototype.grow = function (pages) {
    if (this.buffer.byteLength + pages * 65_536 > MOST_MEMORY) throw new RangeError("too much memory");
    return grow.call(this, pages);
  };
  const [{ loadPyodide }, { default: createPyodideModule }, { default: loadXxhash }] = await Promise.all(
    ["pyodide.mjs", "pyodide.asm.mjs", "xxhash-wasm.js"].map((name) => import(files[name])));
  const xxhash = await loadXxhash();
  python = await loadPyodide({
    indexURL: folder,
    createPyodideModule,
    stdLibURL: files["python_stdlib.zip"],
    lockFileContents: { info: { abi_version: "2026_0", arch: "wasm32", platform: "", python: "", version: "" }, packages: {} },
    packageBaseUrl: folder,
    env: { PYTHONUNBUFFERED: "1", PYTHONIOENCODING: "utf-8:backslashreplace" },
    _makeSnapshot: !snapshot,
    _loadSnapshot: snapshot?.arrayBuffer(),
    _snapshotDeserializer: () => xxhash, // the one object of ours that Python holds
  });
  const write = printer((printed) => postMessage({ printed }));
  python.setStdout({ write });
  python.setStderr({ write });
  python.unpackArchive(await (await originalFetch(files["course.zip"])).arrayBuffer(), "zip", { extractDir: "/course" });
  if (!snapshot) {
    python.registerJsModule("xxhash_wasm", xxhash);
    python.runPython("import sys; sys.path.insert(0, '/course')\nfrom chapters.site.browser import Browser\nfrom chapters.submission import NoInput");
    python.runPython("sys.stdin = NoInput()");
    snapshot = new Blob([python.makeMemorySnapshot({ serializer: () => "xxhash" })]);
  }
  browser = python.runPython("Browser()");
  return { snapshot };
}

// A real model, for the chapters that have one (model/).
async function model({ kernels, weights, ...files }) {
  const { loadModel } = await import(kernels);
  python.registerJsModule("page_model", await loadModel({ weights: new Uint8Array(await weights.arrayBuffer()), ...files }));
}

// Sends text as soon as it is printed, since a loop that never ends may follow, until it is more than one can read.
function printer(send) {
  const decoder = new TextDecoder();
  let linesLeft = MOST_LINES, charactersLeft = MOST_CHARACTERS, column = 0;
  return (bytes) => {
    if (linesLeft <= 0 || charactersLeft <= 0) return bytes.length;
    let text = "";
    for (const character of decoder.decode(bytes, { stream: true })) {
      column = character === "\n" ? 0 : column + 1;
      if (column <= MOST_IN_A_LINE) text += character;
      else if (column === MOST_IN_A_LINE + 1) text += " [this line is longer]";
      linesLeft -= column === 0;
      if (linesLeft <= 0 || text.length >= charactersLeft) break;
    }
    charactersLeft -= text.length;
    if (linesLeft <= 0 || charactersLeft <= 0) text += `${column ? "\n" : ""}[nothing after this is shown]\n`;
    if (text) send(text);
    return bytes.length;
  };
}

self.onmessage = async ({ data: { id, request } }) => {
  try {
    const began = (number) => postMessage({ id, began: number });
    const prepare = { start, model }[request.do];
    const result = prepare ? await prepare(request) : JSON.parse(browser.call(JSON.stringify(request), began));
    postMessage({ id, result });
  } catch (error) {
    postMessage({ id, failure: String(error.message || error) });
  }
};
