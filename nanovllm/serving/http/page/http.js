// Requests with the key that the user has given, and server-sent events as they come.

const field = document.getElementById("key");
field.value = sessionStorage.getItem("key") ?? "";
field.onchange = () => {
  sessionStorage.setItem("key", field.value);
  dispatchEvent(new Event("key"));
};

export async function ask(path, body, signal) {
  const headers = field.value ? { Authorization: `Bearer ${field.value}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw Object.assign(new Error(said.error?.message ?? `status ${response.status}`), { status: response.status });
}

// Each event of a response, parsed, until it ends.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}
