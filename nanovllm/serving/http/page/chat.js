// The chat: messages, what an answer cost, stop, edit and send again.

import { ask, events } from "./http.js";
import { follow } from "./inside.js";

const $ = (id) => document.getElementById(id);
const messages = []; // {role, content, note, request}; of an answer reasoning and calls, of a tool's result call
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
  if ($("tools").value.trim()) {
    given.tools = JSON.parse($("tools").value);
    given.tool_choice = $("tool_choice").value;
  }
  return given;
}

// A message as the API has it.
function sent({ role, content, calls = [], call }) {
  const made = calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role, content, ...(calls.length ? { tool_calls: made } : {}), ...(call ? { tool_call_id: call } : {}) };
}

async function answer() {
  const system = $("system").value.trim();
  const asked = messages.map(sent);
  if (system) asked.unshift({ role: "system", content: system });
  const reply = { role: "assistant", content: "", reasoning: "", calls: [], note: "waiting for the first token" };
  messages.push(reply);
  const control = (running = new AbortController());
  const started = performance.now();
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
      reply.content += choice.delta.content ?? "";
      reply.reasoning += choice.delta.reasoning ?? "";
      for (const { index, id, function: { name, arguments: text } } of choice.delta.tool_calls ?? []) {
        const call = (reply.calls[index] ??= { id: "", name: "", text: "" });
        call.id += id ?? "";
        call.name += name ?? "";
        call.text += text ?? "";
      }
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
  reply.note = cost(usage, first && (first - started) / 1000, (last - first) / 1000, reason);
  if (running === control) running = null;
  const isEmpty = !reply.content && !reply.reasoning && !reply.calls.length;
  if (isEmpty && messages.at(-1) === reply) messages.pop(); // nothing came: the question can be edited
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
  if (message.reasoning) {
    const thought = element("details", "", { className: "reasoning", open: message.isOpen ?? !message.content });
    thought.append(element("summary", "Thought"), element("p", message.reasoning, { className: "content" }));
    thought.ontoggle = () => (message.isOpen = thought.open);
    item.append(thought);
  }
  item.append(element("p", message.content, { className: "content" }));
  for (const call of message.calls ?? []) item.append(drawCall(call, index));
  if (message.role === "user" && !running)
    item.append(element("button", "Edit", { type: "button", onclick: () => edit(index), ariaLabel: `Edit message ${index + 1}` }));
  if (message.name) item.append(element("b", `request ${message.name}`, { className: `who ${message.color}` }), " ");
  if (message.note) item.append(element("small", message.note));
  return item;
}

// A call of the model's. Whoever sits before the page is the tool, and says what comes of it.
function drawCall(call, index) {
  const form = element("form", "", { className: "call" });
  form.append(element("code", `${call.name}(${call.text})`));
  const isOpen = !running && index === messages.length - 1;
  if (!isOpen) return form;
  const field = element("input", "", { value: call.result ?? "", placeholder: "what it gives", ariaLabel: `What ${call.name} gives` });
  field.oninput = () => (call.result = field.value);
  form.append(field, element("button", "Send the result"));
  form.onsubmit = (event) => {
    event.preventDefault();
    const { calls } = messages[index];
    calls.forEach(({ id, result = "" }) => messages.push({ role: "tool", content: result, call: id }));
    answer();
  };
  return form;
}

function edit(index) {
  editing = index;
  draw();
  document.querySelector("#messages textarea").focus();
}

function drawEditor(item, message, index) {
  const field = element("textarea", "", { value: message.content, rows: 3, ariaLabel: "The message, to be sent again" });
  const again = () => {
    running?.abort(); // of a message that was sent meanwhile
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
