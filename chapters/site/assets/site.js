// Every page: copy buttons, the place in the list of contents, the quiz. Nothing here is needed to read the text.
"use strict";

// -- without a network ------------------------------------------------------------------------------------------------

// The service worker keeps what is loaded through it, and what this page says that it has loaded: at once, to a worker
// that is still beginning, for the page may be left at any time. A page that was opened as a file has no worker, nor has
// one that came without TLS from another machine.
if (location.protocol.startsWith("http") && navigator.serviceWorker) {
  const { serviceWorker } = navigator;
  serviceWorker.register(new URL("../service-worker.js", document.currentScript.src)).then((registration) => {
    const tell = (urls) => {
      const { installing, waiting, active } = registration;
      (installing ?? waiting ?? active).postMessage(urls);
    };
    const watch = () => { // what is on its way when a worker begins comes to no worker
      tell([location.href]);
      new PerformanceObserver((list) => tell(list.getEntries().map(({ name }) => name)))
        .observe({ type: "resource", buffered: true });
    };
    watch();
    serviceWorker.addEventListener("controllerchange", watch); // of another build: what it has not seen
  }, () => {}); // it is forbidden
}

// -- copy buttons -----------------------------------------------------------------------------------------------------

for (const block of document.querySelectorAll("pre.code:not(.numbered, .head)")) {
  const around = document.createElement("div");
  const button = document.createElement("button");
  around.className = "copied";
  button.className = "copy";
  button.type = "button";
  button.textContent = WORDS.copy;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(block.textContent);
      button.textContent = WORDS.copied;
    } catch {
      getSelection().selectAllChildren(block); // no clipboard on a page that came without TLS: one key is left
      button.textContent = WORDS.press;
    }
    setTimeout(() => (button.textContent = WORDS.copy), 2000);
  });
  block.replaceWith(around);
  around.append(block, button);
}

// -- where the reader is ----------------------------------------------------------------------------------------------

const entries = [...document.querySelectorAll("nav.toc a")].map((link) => [
  link,
  document.getElementById(decodeURIComponent(link.hash.slice(1))),
]);
const mark = () => {
  const passed = entries.filter(([, heading]) => heading.getBoundingClientRect().top < innerHeight / 3);
  for (const [link] of entries) link.classList.toggle("here", link === passed.at(-1)?.[0]);
};
if (entries.length) addEventListener("scroll", () => requestAnimationFrame(mark), { passive: true });

for (const folded of document.querySelectorAll("details.toc")) {
  folded.addEventListener("click", (event) => event.target.closest("a") && folded.removeAttribute("open"));
}

// -- pictures with something to move -----------------------------------------------------------------------------------

for (const moved of document.querySelectorAll(".moved")) {
  const frames = [...moved.querySelectorAll(".frame")];
  const range = moved.querySelector("input");
  const show = (at) => {
    range.value = at;
    const { setting } = frames[range.value].dataset;
    for (const frame of frames) frame.hidden = frame !== frames[range.value];
    moved.querySelector("output").textContent = setting;
    range.setAttribute("aria-valuetext", setting);
  };
  range.addEventListener("input", () => show(range.value));
  moved.querySelector(".less").addEventListener("click", () => show(Number(range.value) - 1));
  moved.querySelector(".more").addEventListener("click", () => show(Number(range.value) + 1));
  moved.querySelector(".mover").hidden = false;
}

// -- the quiz ---------------------------------------------------------------------------------------------------------

for (const quiz of document.querySelectorAll(".quiz")) {
  const questions = [...quiz.querySelectorAll(".question")];
  const score = quiz.querySelector(".score");
  let numRight = 0;

  const show = (panel, focus) => {
    for (const each of [...questions, score]) each.hidden = each !== panel;
    if (focus) (panel.querySelector(".ask") ?? panel).focus();
  };

  const answer = (question, { said, again, solution }, { right, verdict }) => {
    question.triesLeft -= 1;
    const isLast = right || !question.triesLeft;
    question.querySelector(".verdict").innerHTML = verdict + (right ? "" : isLast ? solution : again);
    if (!isLast) return;
    numRight += right;
    const best = said.find((each) => each.right).value;
    question.querySelector(`.option[value="${best}"]`)?.classList.add("good");
    for (const control of question.querySelectorAll(".options button, .number button, input")) control.disabled = true;
    const next = question.querySelector(".next");
    next.hidden = false;
    next.focus({ preventScroll: true });
  };

  const begin = (focus) => {
    numRight = 0;
    for (const question of questions) {
      question.triesLeft = Number(question.dataset.tries);
      question.querySelector(".verdict").replaceChildren();
      question.querySelector(".next").hidden = true;
      question.querySelector("form")?.reset();
      for (const control of question.querySelectorAll("button, input")) control.disabled = false;
      for (const option of question.querySelectorAll(".option")) option.classList.remove("good", "bad");
    }
    show(questions[0], focus);
  };

  for (const [at, question] of questions.entries()) {
    const sealed = JSON.parse(atob(question.dataset.sealed)); // chapters/site/quiz.py says what is in it
    for (const option of question.querySelectorAll(".option")) {
      option.addEventListener("click", () => {
        const said = sealed.said.find(({ value }) => value === option.value);
        if (!said.right) option.classList.add("bad");
        option.disabled = true; // a second try is another one
        answer(question, sealed, said);
      });
    }
    question.querySelector("form")?.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = event.target.elements.number.value.replaceAll(",", "").trim();
      const given = Number(text);
      if (text === "" || Number.isNaN(given)) {
        question.querySelector(".verdict").textContent = WORDS.type_a_number;
        return;
      }
      const isMeant = ({ value, within }) => value === null || Math.abs(given - value) <= within; // null is the last
      answer(question, sealed, sealed.said.find(isMeant));
    });
    question.querySelector(".next").addEventListener("click", () => {
      if (at + 1 < questions.length) return show(questions[at + 1], true);
      Object.assign(score.dataset, { right: numRight, count: questions.length });
      score.querySelector("p").textContent = filled(WORDS.score, score.dataset);
      show(score, true);
    });
  }
  score.querySelector(".again").addEventListener("click", () => begin(true));
  quiz.querySelector(".questions").hidden = false;
  begin(false);
}
