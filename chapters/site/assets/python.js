// Python in a worker, as lab.js and exercises.js use it: started once, asked one thing at a time, ended and begun anew.

const MANIFEST = new URL("../runtime/manifest.json", import.meta.url).href;

export class Python {
  // progress(loaded, total) in bytes; printed(text): what Python printed.
  constructor({ progress = () => {}, printed = () => {} } = {}) {
    Object.assign(this, { progress, printed, worker: null, waiting: new Map(), lastId: 0 });
  }

  async start() {
    this.worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data }) => this.receive(data);
    this.worker.onerror = (event) => this.end(event.message || "The worker cannot be started.");
    await this.call({ do: "start", manifestUrl: MANIFEST });
  }

  call(request, began = () => {}) {
    const id = ++this.lastId;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject, began });
      this.worker.postMessage({ id, request });
    });
  }

  receive({ id, result, failure, began, loaded, total, printed }) {
    if (loaded !== undefined) return this.progress(loaded, total);
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
    for (const { reject } of this.waiting.values()) reject(new Error(why));
    this.waiting.clear();
  }
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
      const done = loaded >= total ? ", starting Python" : "";
      text.textContent = `${(loaded / 1e6).toFixed(1)} of ${(total / 1e6).toFixed(1)} MB${done}`;
    },
    end() { box.hidden = true; },
    fail(error) { box.hidden = true; failure.hidden = false; failure.textContent = error.message; },
  };
}
