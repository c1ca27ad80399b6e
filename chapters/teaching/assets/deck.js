// Shows a deck: keys, touch, notes, a window for the speaker. Without it the slides stand one below the other.
"use strict";

const slides = [...document.querySelectorAll(".slide")];
const KEYS = "→ ← slides · ↑ ↓ what a picture shows · s speaker's window · n notes · f full screen · Home, End · ? this line";
let at = 0;
let speaker = null;

/** Make the letters of a slide smaller until all of it is seen; fonts are not as wide everywhere. */
function fit(slide) {
  const parts = [slide.querySelector(".body"), ...slide.querySelectorAll(".body pre, .body .scroll, .body svg")];
  const over = () => parts.some((part) => part.scrollWidth > part.clientWidth + 1 || part.scrollHeight > part.clientHeight + 1);
  const large = slide.matches(".lab, .code, .table") ? (slide.querySelector(".body pre") ? 1.45 : 1.25) : 1; // what is short
  slide.style.setProperty("--size", large);
  for (let size = large; over() && size > 0.7; size -= 0.04) {
    slide.style.setProperty("--size", size);
  }
}

function scale() {
  const by = Math.min(innerWidth / 1280, innerHeight / 720);
  for (const slide of slides) {
    slide.style.transform = `translate(${(innerWidth - 1280 * by) / 2}px, ${(innerHeight - 720 * by) / 2}px) scale(${by})`;
  }
}

function show(number) {
  slides[at].classList.remove("now");
  at = Math.max(0, Math.min(slides.length - 1, number));
  slides[at].classList.add("now");
  history.replaceState(null, "", `#${at + 1}`);
  tell();
}

/** Of a picture that can be moved, the next setting or the one before. */
function move(by) {
  const frames = [...slides[at].querySelectorAll(".frame")];
  const now = frames.findIndex((frame) => !frame.hidden);
  if (frames[now + by]) {
    frames[now].hidden = true;
    frames[now + by].hidden = false;
  }
}

/** The speaker's window: the notes of this slide, and what comes next. */
function tell() {
  if (!speaker || speaker.closed) return;
  const notes = slides[at].querySelector(".notes");
  const next = slides[at + 1];
  const page = speaker.document;
  page.body.innerHTML = `<p>${at + 1} of ${slides.length} · <b class="clock"></b></p><h2></h2><div class="said"></div><h3>Next</h3><div class="next"></div>`;
  page.querySelector("h2").textContent = slides[at].querySelector("h1, h2").textContent;
  page.querySelector(".said").innerHTML = notes ? notes.innerHTML : "";
  page.querySelector(".next").textContent = next ? next.querySelector(".face").innerText.slice(0, 300) : "the end";
}

function openSpeaker() {
  speaker = open("", "speaker", "width=800,height=700");
  if (!speaker) return;
  speaker.document.title = `Notes: ${document.title}`;
  speaker.document.head.insertAdjacentHTML("beforeend", "<style>body { font: 20px/1.45 sans-serif; margin: 1rem 2rem; } .next { color: gray; }</style>");
  speaker.onkeydown = press;
  const begun = Date.now();
  setInterval(() => {
    const clock = speaker.closed ? null : speaker.document.querySelector(".clock");
    if (clock) clock.textContent = `${Math.floor((Date.now() - begun) / 60000)} minutes`;
  }, 1000);
  tell();
}

const actions = {
  ArrowRight: () => show(at + 1), PageDown: () => show(at + 1), " ": () => show(at + 1),
  ArrowLeft: () => show(at - 1), PageUp: () => show(at - 1),
  ArrowDown: () => move(1), ArrowUp: () => move(-1),
  Home: () => show(0), End: () => show(slides.length - 1),
  s: openSpeaker,
  n: () => document.documentElement.classList.toggle("noted"),
  f: () => (document.fullscreenElement ? document.exitFullscreen() : document.documentElement.requestFullscreen()),
  "?": () => { document.querySelector(".help").hidden = !document.querySelector(".help").hidden; },
};

function press(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || !actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

document.body.insertAdjacentHTML("beforeend", `<p class="help" hidden>${KEYS}</p>`);
for (const slide of slides) {
  const frames = [...slide.querySelectorAll(".frame")];
  const first = frames.findIndex((frame) => !frame.hidden);
  for (const frame of frames) {  // each must fit, not only the first that is seen
    frames.forEach((other) => { other.hidden = other !== frame; });
    fit(slide);
  }
  frames.forEach((frame, number) => { frame.hidden = number !== first; });
  if (!frames.length) fit(slide);
}
document.documentElement.classList.add("shown");
document.addEventListener("keydown", press);
addEventListener("resize", scale);
addEventListener("hashchange", () => show(parseInt(location.hash.slice(1), 10) - 1 || 0));
addEventListener("beforeprint", () => document.documentElement.classList.remove("shown"));
addEventListener("afterprint", () => document.documentElement.classList.add("shown"));
let touched = 0;
addEventListener("touchstart", (event) => { touched = event.changedTouches[0].clientX; });
addEventListener("touchend", (event) => {
  const moved = event.changedTouches[0].clientX - touched;
  if (Math.abs(moved) > 40) show(at + (moved < 0 ? 1 : -1));
});
scale();
show(parseInt(location.hash.slice(1), 10) - 1 || 0);
