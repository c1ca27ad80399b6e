// Every page: pictures with something to move, questions before a table, the quiz. Nothing here is needed to read the text.
"use strict";

// What the reader typed and answered, in this browser. It may forbid to ask for it.
const remembered = (name) => {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
};
const remember = (name, text) => {
  try {
    localStorage.setItem(name, text);
  } catch {
    // nothing is kept
  }
};

// What scrolls inside itself can be reached by the keyboard.
for (const wide of document.querySelectorAll(".highlight > pre, .table-wrapper, .formula")) wide.tabIndex = 0;
// What the theme leaves out for who listens to a page: the level of a heading, and the names of what is beside the text.
for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = "2";
for (const toc of document.querySelectorAll(".toc-drawer")) toc.ariaLabel = WORDS.on_this_page;
for (const pages of document.querySelectorAll(".sidebar-drawer")) pages.ariaLabel = WORDS.pages;

// On a phone the contents cover the page: who has chosen a section there wants to see it.
document.querySelector(".toc-drawer")?.addEventListener("click", (event) => {
  if (event.target.closest("a")) document.getElementById("__toc").checked = false;
});

// A table whose cells are texts: where it would be too wide, course.css shows a row's cells below each other, by their names.
for (const table of document.querySelectorAll(".table-wrapper > table")) {
  const names = [...table.querySelectorAll("thead th")].map((name) => name.textContent);
  const rows = [...table.querySelectorAll("tbody tr")].map((row) => [...row.cells]);
  const texts = names.filter((_, at) => rows.some((cells) => cells[at]?.textContent.length > 20));
  if (names.length < 3 || texts.length < 2) continue;
  table.classList.add("stack");
  for (const cells of rows) cells.forEach((cell, at) => (cell.dataset.name = names[at]));
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

// The number that was typed, NaN if it is none: as number_in() in chapters/quiz.py, which says what `groups` are.
const numberIn = (typed, groups) => {
  let text = typed.trim().toLowerCase();
  for (const sign of groups) {
    const point = sign === "," ? "." : ",";
    if (new RegExp(`^[+-]?[1-9][0-9]{0,2}([${sign}][0-9]{3})+([${point}][0-9]*)?$`).test(text)) text = text.replaceAll(sign, "");
  }
  text = text.replaceAll(",", ".");
  return /^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?$/.test(text) ? Number(text) : NaN;
};

for (const quiz of document.querySelectorAll(".quiz")) {
  const questions = [...quiz.querySelectorAll(".question")];
  const score = quiz.querySelector(".score");
  let numRight = 0;

  const show = (panel, focus) => {
    for (const each of [...questions, score]) each.hidden = each !== panel;
    if (focus) (panel.querySelector(".ask") ?? panel).focus();
  };

  // An answer that was given now, or before this page was loaded.
  const answer = (question, { value, right, verdict }, isNew = true) => {
    const { said, again, solution } = question.sealed;
    question.triesLeft -= 1;
    question.given.push(value);
    const option = question.querySelector(`.option[value="${value}"]`);
    if (option) {
      option.classList.toggle("bad", !right);
      option.disabled = true; // a second try is another one
    }
    const isLast = right || !question.triesLeft, next = question.querySelector(".next");
    question.querySelector(".verdict").innerHTML = verdict + (right ? "" : isLast ? solution : again);
    next.hidden = !isLast;
    if (isNew) {
      remember(question.dataset.name, JSON.stringify(question.given));
      (isLast ? next : question.querySelector(".verdict")).scrollIntoView({ block: "nearest" });
    }
    if (!isLast) return;
    numRight += right;
    const best = said.find((each) => each.right).value;
    question.querySelector(`.option[value="${best}"]`)?.classList.add("good");
    for (const control of question.querySelectorAll(".options button, .number button, input")) control.disabled = true;
    if (isNew) next.focus({ preventScroll: true });
  };

  const begin = (focus) => {
    numRight = 0;
    for (const question of questions) {
      question.triesLeft = Number(question.dataset.tries);
      question.given = [];
      if (focus) remember(question.dataset.name, "[]");
      question.querySelector(".verdict").replaceChildren();
      question.querySelector(".next").hidden = true;
      question.querySelector("form")?.reset();
      for (const control of question.querySelectorAll("button, input")) control.disabled = false;
      for (const option of question.querySelectorAll(".option")) option.classList.remove("good", "bad");
    }
    show(questions[0], focus);
  };

  const showScore = (focus) => {
    Object.assign(score.dataset, { right: numRight, count: questions.length });
    score.querySelector("p").textContent = filled(WORDS.score, score.dataset);
    show(score, focus);
  };

  for (const [at, question] of questions.entries()) {
    question.sealed = JSON.parse(atob(question.dataset.sealed)); // chapters/site/quiz.py says what is in it
    const { said } = question.sealed;
    for (const option of question.querySelectorAll(".option")) {
      option.addEventListener("click", () => {
        answer(question, said.find(({ value }) => value === option.value));
      });
    }
    question.querySelector("form")?.addEventListener("submit", (event) => {
      event.preventDefault();
      const given = numberIn(event.target.elements.number.value, event.target.dataset.groups);
      if (!Number.isFinite(given)) {
        question.querySelector(".verdict").textContent = WORDS.type_a_number;
        return;
      }
      const isMeant = ({ value, within }) => value === null || Math.abs(given - value) <= within; // null is the last
      answer(question, said.find(isMeant));
    });
    question.querySelector(".next").addEventListener("click", () => {
      if (at + 1 < questions.length) show(questions[at + 1], true);
      else showScore(true);
    });
  }
  score.querySelector(".again").addEventListener("click", () => begin(true));
  quiz.querySelector(".questions").hidden = false;
  begin(false);
  for (const question of questions)
    for (const given of JSON.parse(remembered(question.dataset.name) ?? "[]"))
      answer(question, question.sealed.said.find(({ value }) => value === given), false);
  const open = questions.find((question) => question.querySelector(".next").hidden);
  if (open) show(open, false);
  else showScore(false);
}

// -- a question before a table: what do you expect? -------------------------------------------------------------------

for (const form of document.querySelectorAll("form.expect")) {
  const chapter = Number(location.pathname.match(/\/ch(\d\d)_\w+\//)?.[1] ?? 0);
  const name = `nanovllm-expected-${chapter}-${form.dataset.name}`, answer = form.nextElementSibling;
  const said = form.querySelector(".expected"), input = form.elements.expected;
  const show = (text) => {
    form.querySelector(".typed-in").hidden = true;
    said.textContent = text ? filled(WORDS.expected, { text }) : WORDS.expected_nothing;
    said.hidden = answer.hidden = false;
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    remember(name, input.value.trim());
    show(input.value.trim());
  });
  const before = remembered(name);
  if (before === null) {
    answer.hidden = true;
    form.querySelector(".typed-in").hidden = false;
  } else {
    show(before);
  }
}

// A link leads to what is covered, from the lab say.
const uncover = () => {
  const target = document.getElementById(location.hash.slice(1)), answer = target?.closest(".answer[hidden]");
  if (!answer) return;
  answer.hidden = false;
  target.scrollIntoView();
};
addEventListener("hashchange", uncover);
uncover();
