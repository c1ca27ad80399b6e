// A real model on a page. It is fetched once, by a click, and kept in the browser; Python says what there is to see.

import { Python, cacheOf, loadFiles, loadingBar } from "./python.js";

const FOLDER = new URL("../model/", import.meta.url);

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

// The model's files. progress(loaded, total) in bytes.
async function load(progress) {
  const blobs = await loadFiles(FOLDER, await cacheOf("nanovllm-model"), progress);
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
