// The engine beside the chat: frames that the server has drawn. A page that is not looked at is not drawn for.

import { ask, events } from "./http.js";

const $ = (id) => document.getElementById(id);
const cells = []; // the pool's, as elements
const followed = new Map(); // request id -> [the message that it answers, what draws it]
let marked = []; // cells to which something had happened in the frame before
let control = null;
let pace = { steps_left: null, delay_s: 0 };

// Let a chat message know the name that the pictures give its request.
export function follow(message, request, draw) {
  message.request = request;
  followed.set(request, [message, draw]);
  markOurs();
}

function markOurs() {
  for (const card of document.querySelectorAll("#running .card, #waiting .card")) {
    const [message, draw] = followed.get(card.dataset.request) ?? [];
    if (!message) continue;
    card.classList.add("mine");
    if (message.name) continue;
    message.name = card.querySelector(".who").textContent;
    message.color = [...card.classList].find((name) => name.startsWith("seq-"));
    draw();
  }
}

async function watch() {
  control?.abort();
  if (document.hidden) return;
  const mine = (control = new AbortController());
  while (!mine.signal.aborted) {
    let reason = "the server has gone";
    try {
      for await (const frame of events(await ask("inside/events", null, mine.signal))) show(frame);
    } catch (error) {
      if (mine.signal.aborted) return;
      reason = error.message;
      if (error.status === 401) return ($("link").textContent = `${reason} (under Parameters)`);
    }
    $("link").textContent = `Not connected: ${reason}. Trying again...`;
    await new Promise((then) => setTimeout(then, 2000));
  }
}
document.addEventListener("visibilitychange", watch);
addEventListener("key", watch);
watch();

function show(frame) {
  if (frame.num_blocks) {
    const cell = frame.blocks_per_cell > 1 ? `, ${frame.blocks_per_cell} to a square` : "";
    $("pool-title").textContent = `The KV pool: ${frame.num_blocks.toLocaleString("en")} blocks of ${frame.block_size} tokens${cell}`;
    $("pool").replaceChildren();
    cells.length = marked.length = 0;
  }
  for (const [id, html] of Object.entries(frame.panels ?? {})) $(id).innerHTML = html;
  markOurs();
  drawPool(frame.cells ?? {});
  drawPace(frame);
}

function drawPool(changed) {
  for (const cell of marked) cell.removeAttribute("data-event");
  marked = [];
  const template = document.createElement("template"), fresh = [];
  for (const [index, html] of Object.entries(changed)) {
    template.innerHTML = html;
    const cell = template.content.firstElementChild;
    cell.title = cell.textContent;
    if (cells[index]) cells[index].replaceWith(cell);
    else fresh.push(cell);
    cells[index] = cell;
    if (cell.dataset.event) marked.push(cell);
  }
  $("pool").append(...fresh);
  $("pool").classList.toggle("small", cells.length > 160);
  $("pool").classList.toggle("tiny", cells.length > 800);
}

// -- slower, for teaching ---------------------------------------------------------------------------------------------

function drawPace(frame) {
  pace = { steps_left: frame.steps_left, delay_s: frame.delay_s };
  const paused = pace.steps_left !== null;
  $("pace").hidden = !frame.classroom;
  $("pause").textContent = paused ? "Go on" : "Pause";
  $("pause").setAttribute("aria-pressed", paused);
  $("step").disabled = !paused;
  if (document.activeElement !== $("delay")) $("delay").value = pace.delay_s;
  $("delay-text").textContent = Number($("delay").value) ? `${$("delay").value} s between steps` : "off";
  $("link").textContent = paused ? "Paused: every request stands still." : "What this page shows is the engine's own state.";
}

async function controlEngine(path, body) {
  try {
    await ask(path, body);
  } catch (error) {
    $("link").textContent = error.message;
  }
}
const change = (more) => controlEngine("inside/pace", { ...pace, ...more });
$("pause").onclick = () => change({ steps_left: pace.steps_left === null ? 0 : null });
$("step").onclick = () => change({ steps_left: 1 });
$("delay").oninput = () => change({ delay_s: Number($("delay").value) });
$("forget").onclick = () => controlEngine("inside/forget", {});
