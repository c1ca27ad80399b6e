// The worker: Python and the course's own files, away from the page, so that an endless loop cannot freeze it.

let browser; // the Python object of browser.py

async function download(name, file, manifestUrl, progress) {
  const url = new URL(file.url, manifestUrl);
  const response = await fetch(url).catch((error) => {
    throw new Error(`${url} cannot be loaded (${error.message}). Is there a network?`);
  });
  if (!response.ok) throw new Error(`${url} cannot be loaded: ${response.status} ${response.statusText}`);
  const reader = response.body.getReader();
  const chunks = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    chunks.push(value);
    progress(value.length);
  }
  const type = name.endsWith(".wasm") ? "application/wasm" : "text/javascript";
  const blob = URL.createObjectURL(new Blob(chunks, { type }));
  // The browser compares the hash. Not on the first fetch, which would then show no progress.
  await fetch(blob, { integrity: file.integrity }).catch(() => {
    throw new Error(`${url} is not the file that this site was built with (its hash differs). Reload the page.`);
  });
  return blob;
}

async function start({ manifestUrl }) {
  const manifest = await (await fetch(manifestUrl, { cache: "no-cache" })).json();
  const files = Object.entries(manifest);
  const total = files.reduce((sum, [, file]) => sum + file.size, 0);
  let loaded = 0;
  const progress = (bytes) => postMessage({ loaded: (loaded += bytes), total });
  const urls = {};
  await Promise.all(files.map(async ([name, file]) => (urls[name] = await download(name, file, manifestUrl, progress))));

  const originalFetch = self.fetch;
  self.fetch = (url, options) => // Pyodide asks for this one by its name, in a folder
    String(url).endsWith("/pyodide.asm.wasm") ? originalFetch(urls["pyodide.asm.wasm"]) : originalFetch(url, options);
  const [{ loadPyodide }, { default: createPyodideModule }, { default: xxhash }] = await Promise.all(
    ["pyodide.mjs", "pyodide.asm.mjs", "xxhash-wasm.js"].map((name) => import(urls[name])));
  const python = await loadPyodide({
    indexURL: new URL("./", manifestUrl).href,
    createPyodideModule,
    stdLibURL: urls["python_stdlib.zip"],
    lockFileContents: { info: { abi_version: "2026_0", arch: "wasm32", platform: "", python: "", version: "" }, packages: {} },
    packageBaseUrl: new URL("./", manifestUrl).href,
  });
  python.registerJsModule("xxhash_wasm", await xxhash());
  python.setStdout({ batched: (printed) => postMessage({ printed }) });
  python.setStderr({ batched: (printed) => postMessage({ printed }) });
  python.unpackArchive(await (await originalFetch(urls["course.zip"])).arrayBuffer(), "zip", { extractDir: "/course" });
  python.runPython("import sys; sys.path.insert(0, '/course')\nfrom chapters.site.browser import Browser");
  browser = python.runPython("Browser()");
  Object.values(urls).forEach((url) => URL.revokeObjectURL(url));
  return {};
}

self.onmessage = async ({ data: { id, request } }) => {
  try {
    const began = (number) => postMessage({ id, began: number });
    const result = request.do === "start" ? await start(request) : JSON.parse(browser.call(JSON.stringify(request), began));
    postMessage({ id, result });
  } catch (error) {
    postMessage({ id, failure: String(error.message || error) });
  }
};
