// Keeps what this browser has loaded of the course, so that it is there without a network, too. With one, all comes from
// there: nobody reads an old text. The model's files are kept by model.js.

const VERSION = "@VERSION@"; // of the site's content: another build is another service worker, with a cache of its own
const NOT_KEPT = "@NOT_KEPT@"; // by language: what a page says that is not there without a network
const FIRST = "@FIRST@"; // where that leads: kept even if it was not opened
const SCOPE = self.registration.scope; // the site's folder; a host may have other sites beside it
const OURS = `nanovllm-pages ${SCOPE} `, KEPT = OURS + VERSION;

// A file of the site, or of the CDN that it has Python from.
const isWanted = (url) => url.startsWith("http") && !url.startsWith(`${SCOPE}model/`)
  && (url.startsWith(SCOPE) || new URL(url).origin !== self.location.origin);

// A file's name in the cache: a folder is its index.html, and search.html is one page whatever is searched.
function nameOf(url) {
  const { origin, pathname } = new URL(url);
  return origin + pathname.replace(/\/$/, "/index.html");
}

self.addEventListener("install", (event) => {
  self.skipWaiting();
  event.waitUntil(Promise.allSettled(FIRST.map((path) => keep(SCOPE + path))));
});
self.addEventListener("activate", (event) => event.waitUntil(begin()));
self.addEventListener("fetch", (event) => {
  const { method, url } = event.request;
  if (method === "GET" && isWanted(url)) event.respondWith(answer(event));
});
// From a page: the addresses of all that it has loaded, some of it before this worker began.
self.addEventListener("message", (event) => event.waitUntil(Promise.allSettled(event.data.map(keep))));

async function begin() {
  for (const name of await caches.keys()) if (name.startsWith(OURS) && name !== KEPT) await caches.delete(name);
  await self.clients.claim();
}

async function answer(event) {
  const { request } = event;
  try {
    const response = await fetch(request);
    event.waitUntil(put(request.url, response.clone()));
    return response;
  } catch (error) {
    const kept = await (await caches.open(KEPT)).match(nameOf(request.url));
    if (kept) return kept;
    if (request.mode === "navigate") return notKept(request.url);
    throw error;
  }
}

function notKept(url) {
  const language = new URL(url).pathname.match(/\.(\w+)\.html$/)?.[1];
  const said = (NOT_KEPT[language] ?? NOT_KEPT.en).replace("@SCOPE@", () => SCOPE); // as it stands, whatever $ is in it
  return new Response(said, { status: 503, headers: { "Content-Type": "text/html; charset=utf-8" } });
}

async function keep(url) {
  if (isWanted(url) && !(await (await caches.open(KEPT)).match(nameOf(url)))) await put(url, await fetch(url));
}

// Whole answers only. Where there is no room, the file is fetched again next time.
async function put(url, response) {
  if (response.status === 200) await (await caches.open(KEPT)).put(nameOf(url), response);
}
