// The chat: messages, what an answer cost, stop, edit and send again.

import { ask, events } from "./http.js";
import { follow } from "./inside.js";

const $ = (id) => document.getElementById(id);
const messages = []; // {role, content, note, request}
let running = null; // the AbortController of the answer that is being written
let editing = -1; // the message that is being edited

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  messages.push({ role: "user", content: text });
  answer();
};
$("text").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
};
$("stop").onclick = () => running?.abort();
$("anew").onclick = () => {
  running?.abort();
  messages.length = 0;
  editing = -1;
  draw();
  $("text").focus();
};

ask("v1/models").then(async (response) => {
  const [model] = (await response.json()).data;
  $("model").textContent = `${model.id}, up to ${model.max_model_len.toLocaleString("en")} tokens`;
}, () => {});

function parameters() {
  const given = { stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"])
    if ($(name).value !== "") given[name] = Number($(name).value);
  return given;
}

async function answer() {
  const system = $("system").value.trim();
  const asked = messages.map(({ role, content }) => ({ role, content }));
  if (system) asked.unshift({ role: "system", content: system });
  const reply = { role: "assistant", content: "", note: "waiting for the first token" };
  messages.push(reply);
  const control = (running = new AbortController());
  const sent = performance.now();
  let first = 0, last = 0, usage = null, reason = "";
  $("problem").hidden = true;
  draw();
  try {
    const response = await ask("v1/chat/completions", { messages: asked, ...parameters() }, control.signal);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      last = performance.now();
      first ||= last;
      reason = choice.finish_reason ?? reason;
      reply.content += choice.delta.content;
      if (!reply.request) follow(reply, chunk.id.replace("chatcmpl-", "") + "-0", drawNewest);
      reply.note = "";
      drawNewest();
    }
  } catch (error) {
    if (!control.signal.aborted) {
      $("problem").textContent = error.message;
      $("problem").hidden = false;
      if (error.status === 401) $("settings").open = true;
    }
    reason = control.signal.aborted ? "stopped" : "broken off";
  }
  reply.note = cost(usage, first && (first - sent) / 1000, (last - first) / 1000, reason);
  if (running === control) running = null;
  if (!reply.content && messages.at(-1) === reply) messages.pop(); // nothing came: the question can be edited
  draw();
}

function cost(usage, ttft, seconds, reason) {
  if (!usage) return reason;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0, rest = usage.completion_tokens - 1;
  const parts = [`${usage.prompt_tokens} prompt tokens, ${cached} found in the cache`];
  if (ttft) parts.push(`first token after ${ttft.toFixed(2)} s`);
  if (rest > 0 && seconds > 0) parts.push(`then ${(rest / seconds).toFixed(1)} tokens/s`);
  if (reason === "length") parts.push("cut at max_tokens");
  return parts.join("; ");
}

// -- drawing ----------------------------------------------------------------------------------------------------------

function draw() {
  $("messages").replaceChildren(...messages.map(drawMessage));
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  $("messages").lastElementChild?.scrollIntoView({ block: "nearest" });
}

function drawNewest() {
  const list = $("messages"), stays = list.scrollTop + list.clientHeight < list.scrollHeight - 40;
  list.lastElementChild?.replaceWith(drawMessage(messages.at(-1), messages.length - 1));
  if (!stays) list.scrollTop = list.scrollHeight;
}

function element(name, text, more = {}) {
  return Object.assign(document.createElement(name), { textContent: text }, more);
}

function drawMessage(message, index) {
  const item = element("li", "", { className: message.role });
  if (index === editing) return drawEditor(item, message, index);
  item.append(element("p", message.content, { className: "content" }));
  if (message.role === "user" && !running)
    item.append(element("button", "Edit", { type: "button", onclick: () => edit(index), ariaLabel: `Edit message ${index + 1}` }));
  if (message.name) item.append(element("b", `request ${message.name}`, { className: `who ${message.color}` }), " ");
  if (message.note) item.append(element("small", message.note));
  return item;
}

function edit(index) {
  editing = index;
  draw();
  document.querySelector("#messages textarea").focus();
}

function drawEditor(item, message, index) {
  const field = element("textarea", "", { value: message.content, rows: 3, ariaLabel: "The message, to be sent again" });
  const again = () => {
    editing = -1;
    messages.splice(index);
    messages.push({ role: "user", content: field.value.trim() || message.content });
    answer();
  };
  const leave = () => {
    editing = -1;
    draw();
  };
  field.onkeydown = (event) => {
    if (event.key === "Escape") leave();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    again();
  };
  item.append(field, element("button", "Send again", { type: "button", onclick: again }),
    element("button", "Cancel", { type: "button", onclick: leave }));
  return item;
}
