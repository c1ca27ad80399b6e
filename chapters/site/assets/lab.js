// A lab: buttons, keys and the address bar play it, Python says what there is to see, and what moved glides.

import { Python, loadingBar } from "./python.js";

const section = document.querySelector("section.lab");
if (section) run(section);

function run(section) {
  const $ = (selector) => section.querySelector(selector);
  const chapter = Number(section.dataset.chapter), bar = loadingBar(section);
  const python = new Python();
  const linked = () => { // "" if the address leads to a place on this page instead
    const hash = location.hash.slice(1);
    return document.getElementById(hash) ? "" : hash;
  };
  let running = false, shown = null, following = null; // shown: the link of what is drawn; following: that of the next scene
  let isBegun = false; // a scene, and none of its steps has been taken
  let queue = Promise.resolve(); // one thing at a time, in the order of clicks

  const then = (job) => (queue = queue.then(job).catch((error) => bar.fail(error)));
  const play = (move, ...args) => then(async () => show(await python.call({ do: "play", move, arguments: args })));

  $(".needs-server").hidden = true;
  $(".begin").hidden = false;
  noticeLink();
  $(".start").onclick = start;
  $(".back").onclick = () => play("back");
  $(".forward").onclick = forward;
  $(".scenes").addEventListener("click", (event) => { // who wants to see a scene wants the lab to start
    if (event.target.matches("li > a:first-child") && !running && !$(".start").disabled) start();
  });
  $(".copy").onclick = copy;
  for (const button of section.querySelectorAll("[data-key-name]"))
    button.onclick = () => play("do", button.dataset.keyName);
  $(".typed")?.addEventListener("submit", (event) => {
    event.preventDefault();
    const input = event.target.elements.text;
    if (input.value.trim()) play("do", "t", input.value);
    input.value = "";
    input.blur();
  });
  window.addEventListener("hashchange", () => {
    if (!running) noticeLink();
    else if ((linked() || !location.hash) && linked() !== shown) openLink(); // without a hash: back to the beginning
  });
  document.addEventListener("keydown", press);

  // What Start leads to: where this tab was before, or where a link leads.
  function noticeLink() {
    const [{ type }] = performance.getEntriesByType("navigation"), [done] = linked().split("/");
    const count = [...done.matchAll(/[a-z](?:\([^()]*\)|(\d+))?/gi)].reduce((sum, [, times]) => sum + Number(times ?? 1), 0);
    const actions = `${count} action${count === 1 ? "" : "s"}`;
    $(".from-link").hidden = !linked();
    if (type !== "navigate" && count) $(".from-link").textContent = `You were here: Start brings back your ${actions}.`;
    else $(".from-link").textContent = `The link leads into the lab${count ? `, after ${actions}` : ""}: press Start to see it.`;
  }

  async function start() {
    $(".start").disabled = true;
    bar.begin();
    try {
      await python.start(bar.progress);
      show(await python.call({ do: "lab", chapter }), false);
      running = true;
      $(".begin").hidden = true;
      $(".playing").hidden = false;
      if (linked()) openLink();
    } catch (error) {
      python.end("");
      bar.fail(error);
      $(".start").disabled = false;
    }
  }

  function openLink() {
    play("go_to", linked());
    then(() => $(".playing").scrollIntoView({ behavior: still() ? "auto" : "smooth" })); // the list above is closed by then
  }

  function press(event) {
    if (!running || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) {
      if (event.key === "Escape") event.target.blur?.();
      return;
    }
    const scrolls = event.target.matches?.("[tabindex='0']"); // what is wider than its place
    if (event.key === "ArrowLeft" && !scrolls) play("back");
    else if (event.key === "ArrowRight" && !scrolls) forward();
    else if (event.target !== document.body && !section.contains(event.target)) return; // letters are the lab's while it, or nothing, has the focus
    else if (event.key === "t" && $(".typed")) $(".typed input").focus();
    else if (section.querySelector(`[data-key-name="${CSS.escape(event.key)}"]`)) play("do", event.key);
    else return;
    event.preventDefault();
  }

  const listed = (title) => [...section.querySelectorAll(".scenes li")].find((each) => each.firstChild.textContent === title);

  // The way back to the paragraph that names this scene: it stands in the list of scenes.
  function placeInText(title) {
    const link = listed(title)?.querySelector(".to-text");
    return link ? [link.cloneNode(true)] : [];
  }

  // The link of the scene to see next, when one has ended or none has begun.
  function nextScene({ scene, num_done, num_ahead }) {
    if (num_ahead || (num_done && !scene)) return null;
    const item = scene ? listed(scene[0])?.nextElementSibling : section.querySelector(".scenes li");
    return item?.firstChild ?? null;
  }

  function forward() {
    if (following) location.hash = following.hash;
    else play("forward");
  }

  async function copy() {
    try {
      await navigator.clipboard.writeText(location.href);
      $(".copy").textContent = "copied";
    } catch {
      $(".copy").textContent = "not allowed here: see the address bar";
    }
  }

  function show(view, write = true) {
    if (view.problem) {
      $(".said").textContent = view.problem;
      return;
    }
    shown = view.link;
    $(".copy").textContent = "copy the address";
    if (write) history.replaceState(null, "", view.link ? `#${view.link}` : location.pathname + location.search);
    $(".said").textContent = view.said || (view.did ? `Action ${view.num_done}: ${view.did}` : "Nothing has happened yet.");
    $(".back").disabled = !view.num_done;
    following = nextScene(view);
    $(".forward").disabled = !view.num_ahead && !following;
    $(".forward").textContent = following ? `\u25b6 ${following.textContent}` : view.num_ahead ? `next \u25b6 (${view.num_ahead} to come)`
      : view.scene ? "That was the last scene" : "next \u25b6";
    if (view.num_ahead && view.scene?.[0] !== $(".scene-title").textContent) $(".own").open = false; // one has begun
    else if (view.num_done && !view.scene) $(".own").open = true;
    const begins = view.scene?.[0] !== $(".scene-title").textContent; // on a phone its text is folded after the first step
    if (begins || isBegun) $(".scene").open = begins || !matchMedia("(max-width: 67em)").matches;
    isBegun = begins;
    $(".scene").hidden = !view.scene;
    $(".scene-title").textContent = view.scene?.[0] ?? "";
    $(".scene-text").textContent = view.scene?.[1] ?? "";
    $(".scene-place").replaceChildren(...placeInText(view.scene?.[0]));
    if (view.scene) $(".scenes").open = false;
    for (const [key, value] of Object.entries(view.values))
      $(`[data-key-name="${key}"] .value`).textContent = value && `: ${value}`;
    draw($(".panels"), view.panels);
  }
}

const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// Where is everything that may move? Name -> its place, and the element.
function places(box) {
  return new Map([...box.querySelectorAll("[data-key]")].map((el) => [el.dataset.key, [el.getBoundingClientRect(), el]]));
}

function draw(box, panels) {
  const before = places(box), anchor = box.getBoundingClientRect();
  if (box.children.length !== panels.length)
    box.innerHTML = panels.map((_, i) => `<section class="panel" aria-labelledby="panel${i}"><h3 id="panel${i}"></h3><div></div></section>`).join("");
  panels.forEach(([title, html], i) => {
    const [head, body] = box.children[i].children;
    head.textContent = title;
    if (body.html === html) return;
    body.html = body.innerHTML = html;
    for (const wide of body.querySelectorAll(".scroll")) {
      wide.setAttribute("role", "region");
      wide.setAttribute("aria-labelledby", head.id);
      if (wide.querySelector(".timeline")) wide.scrollLeft = wide.scrollWidth;
    }
  });
  if (!before.size || still()) return;
  const after = places(box), now = box.getBoundingClientRect(), used = new Set();
  for (const [key, [to, element]] of after) {
    const from = [key, ...(element.dataset.from ?? "").split(" ")].find((name) => before.has(name));
    if (!from) {
      element.animate([{ opacity: 0 }, { opacity: 1 }], { duration: 400 });
      continue;
    }
    used.add(from);
    const old = before.get(from)[0];
    const x = old.left - anchor.left - (to.left - now.left), y = old.top - anchor.top - (to.top - now.top);
    if (Math.abs(x) + Math.abs(y) < 2) continue;
    const order = Number(element.style.getPropertyValue("--order") || 0);
    element.classList.add("moving");
    element.animate([{ transform: `translate(${x}px, ${y}px)` }, { transform: "none" }],
      { duration: 600, delay: Math.min(order, 12) * 120, easing: "ease-in-out", fill: "backwards" })
      .finished.then(() => element.classList.remove("moving"), () => {});
  }
  for (const [key, [rect, element]] of before) // a name that was evicted, a request that ended: it fades where it was
    if (/^[ns]/.test(key) && !used.has(key) && !after.has(key)) {
      const ghost = element.cloneNode(true);
      ghost.removeAttribute("data-key");
      ghost.classList.add("ghost");
      Object.assign(ghost.style, { left: `${rect.left - anchor.left}px`, top: `${rect.top - anchor.top}px`,
        width: `${rect.width}px`, height: `${rect.height}px` });
      ghost.ariaHidden = "true";
      box.parentElement.append(ghost);
      ghost.animate([{ opacity: 1 }, { opacity: 0 }], { duration: 1500 }).finished.finally(() => ghost.remove());
    }
}
