// The engine beside the chat: frames that the server has drawn. A page that is not looked at is not drawn for.

import { ask, events } from "./http.js";

const $ = (id) => document.getElementById(id);
const cells = []; // the pool's, as elements
let runs = new Map(); // "state from to" -> what stands for these cells
let blocksPerCell = 1, numBlocks = 0;
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
    [blocksPerCell, numBlocks] = [frame.blocks_per_cell, frame.num_blocks];
  }
  for (const [id, html] of Object.entries(frame.panels ?? {})) $(id).innerHTML = html;
  markOurs();
  drawPool(frame.cells ?? {});
  $("of-images").hidden = !cells.some((cell) => cell.classList.contains("image"));
  $("of-snapshots").hidden = !frame.panels?.counters?.includes("snapshots");
  drawPace(frame);
}

function drawPool(changed) {
  for (const cell of marked) cell.removeAttribute("data-event");
  marked = [];
  const template = document.createElement("template");
  for (const [index, html] of Object.entries(changed)) {
    template.innerHTML = html;
    const cell = template.content.firstElementChild;
    cells[index]?.replaceWith(cell);
    cells[index] = cell;
    if (cell.dataset.event) marked.push(cell);
  }
  const isLarge = cells.length > 160, shown = isLarge ? folded() : cells, pool = $("pool");
  if (shown.length !== pool.childElementCount || shown.some((cell) => cell.parentNode !== pool)) pool.replaceChildren(...shown);
  pool.classList.toggle("small", shown.length > (isLarge ? 60 : 160));
  pool.classList.toggle("tiny", shown.length > 320);
}

// The cells, but one stands for each run of 24 or more that are free, or cached, without marks, and to which nothing has happened.
function folded() {
  const shown = [], before = runs;
  runs = new Map();
  for (let start = 0, end; start < cells.length; start = end) {
    const state = unheld(cells[start]);
    for (end = start + 1; state && end < cells.length && unheld(cells[end]) === state; end++);
    if (end - start < 24) {
      shown.push(...cells.slice(start, end));
      continue;
    }
    const key = `${state} ${start} ${end}`;
    runs.set(key, before.get(key) ?? drawRun(state, start * blocksPerCell, Math.min(end * blocksPerCell, numBlocks)));
    shown.push(runs.get(key));
  }
  return shown;
}

function unheld(cell) {
  return cell.dataset.event || cell.matches(".snapshot, .image") ? undefined : ["free", "cached"].find((state) => cell.classList.contains(state));
}

function drawRun(state, start, end) {
  const run = document.createElement("li"), text = (number) => number.toLocaleString("en");
  const what = state === "cached" && blocksPerCell > 1 ? "cached or free" : state; // a cell shows the most of its blocks
  run.className = `block run ${state}`;
  run.innerHTML = `<span class="id">${start} to ${end - 1}</span><b>${text(end - start)}</b> ${what}`;
  run.title = `blocks ${start} to ${end - 1}: ${what}`;
  return run;
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
