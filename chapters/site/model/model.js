// A real model on a page. It is fetched once, by a click, and kept in the browser; Python says what there is to see.

import { Python, download, fetched, loadingBar } from "./python.js";

const FOLDER = new URL("../model/", import.meta.url), MANIFEST = new URL("manifest.json", FOLDER), KEPT = "nanovllm-model";

const section = document.querySelector("section.model[data-chapter]");
if (section) run(section);

function run(section) {
  const $ = (selector) => section.querySelector(selector);
  const chapter = Number(section.dataset.chapter), bar = loadingBar(section), python = new Python();
  let queue = Promise.resolve(), running = false; // one thing at a time, in the order of clicks; running: step after step

  $(".start").onclick = start;
  $(".asking").onsubmit = (event) => {
    event.preventDefault();
    running = false;
    ask("begin");
  };
  for (const slider of section.querySelectorAll("[data-stops]")) {
    slider.oninput = () => (slider.previousElementSibling.value = value(slider));
    slider.onchange = () => ask(section.dataset.moved);
  }
  section.addEventListener("click", ({ target }) => {
    const button = target.closest("[data-act]");
    if (!button) return;
    running = button.dataset.act === "run";
    if (button.dataset.act !== "pause") ask(button.dataset.act, button.dataset);
  });

  async function start() {
    $(".start").disabled = true;
    bar.begin();
    try {
      const files = await load(bar.progress);
      await python.start(bar.progress);
      await python.call({ do: "model", ...files });
      $(".begin").hidden = true;
      $(".asking").hidden = false;
      await ask("begin");
    } catch (error) {
      python.end("");
      bar.fail(error);
      $(".start").disabled = false;
    }
  }

  function value(input) {
    return input.dataset.stops ? input.dataset.stops.split(" ")[input.value] : input.value;
  }

  function ask(act, more = {}) {
    const values = { ...more, language: document.documentElement.lang };
    for (const input of section.querySelectorAll("[data-name]")) values[input.dataset.name] = value(input);
    queue = queue.then(async () => {
      $(".failure").hidden = true;
      section.ariaBusy = "true";
      const view = await python.call({ do: "learn", chapter, act, values });
      if (view.problem) return bar.fail(new Error(view.problem));
      show(view);
      if (running && view.more) ask("run");
    }).catch((error) => bar.fail(error)).finally(() => (section.ariaBusy = "false"));
    return queue;
  }

  function show({ panels, said }) {
    $(".said").textContent = said;
    $(".shown").innerHTML = panels.map(([title, html]) => `<section class="panel"><h3>${title}</h3>${html}</section>`).join("");
  }
}

// The model's files, from where they are kept, or from the site. progress(loaded, total) in bytes.
async function load(progress) {
  const kept = await self.caches?.open(KEPT); // none on a page that came without TLS from another machine
  const manifest = await newest(kept);
  const total = Object.values(manifest).reduce((sum, file) => sum + file.size, 0);
  let loaded = 0;
  const count = (bytes) => progress((loaded += bytes), total);
  const blobs = {}, wanted = new Set([MANIFEST.href]);
  for (const [name, { url, integrity, size }] of Object.entries(manifest)) {
    const address = new URL(`${url}?${encodeURIComponent(integrity)}`, FOLDER); // another file has another address
    const found = await kept?.match(address);
    wanted.add(address.href);
    blobs[name] = found ? await found.blob() : await download(address, integrity, count);
    if (found) count(size);
    else await kept?.put(address, new Response(blobs[name])).catch(() => {}); // no room: it is fetched again next time
  }
  for (const { url } of (await kept?.keys()) ?? []) if (!wanted.has(url)) await kept.delete(url);
  const script = (name) => URL.createObjectURL(new Blob([blobs[name]], { type: "text/javascript" }));
  return {
    kernels: script("kernels.js"),
    tokenizers: script("tokenizers.min.mjs"),
    program: await WebAssembly.compile(await blobs["program.wasm"].arrayBuffer()),
    weights: blobs["weights.bin"],
    layout: await blobs["layout.json"].text(),
    tokenizer: await blobs["tokenizer.json"].text(),
    tokenizer_config: await blobs["tokenizer_config.json"].text(),
  };
}

// The site's manifest; without a network, the one that is kept.
async function newest(kept) {
  try {
    const response = await fetched(MANIFEST, { cache: "no-cache" });
    await kept?.put(MANIFEST, response.clone());
    return await response.json();
  } catch (error) {
    const found = await kept?.match(MANIFEST);
    if (!found) throw error;
    return found.json();
  }
}
