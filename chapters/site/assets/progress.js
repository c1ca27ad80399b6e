// What a reader has done, kept by kept.js: chapters read, answers, expectations; shown beside the contents.
"use strict";

const chapterHere = Number(location.pathname.match(/\/ch(\d\d)_\w+\//)?.[1] ?? 0);

// -- a chapter that has been read -------------------------------------------------------------------------------------

for (const box of document.querySelectorAll("[data-read]")) {
  const name = `read-${box.dataset.read}`;
  box.checked = kept.get(name) !== null;
  box.addEventListener("change", () => kept.set(name, box.checked ? "yes" : null));
  box.closest("p").hidden = false;
}

// -- a question before a table: what do you expect? -------------------------------------------------------------------

for (const form of document.querySelectorAll("form.expect")) {
  const name = `expected-${chapterHere}-${form.dataset.name}`, answer = form.nextElementSibling;
  const said = form.querySelector(".expected"), input = form.elements.expected;
  const show = (text) => {
    form.querySelector(".typed-in").hidden = true;
    said.textContent = text ? filled(WORDS.expected, { text }) : WORDS.expected_nothing;
    said.hidden = answer.hidden = false;
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    kept.set(name, input.value.trim());
    show(input.value.trim());
  });
  const before = kept.get(name);
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

// -- the quiz ---------------------------------------------------------------------------------------------------------

for (const quiz of document.querySelectorAll(".quiz")) {
  const name = `quiz-${chapterHere}`, questions = [...quiz.querySelectorAll(".question")];
  const note = (change) => kept.set(name, JSON.stringify({ ...kept.json(name, {}), ...change }));

  // The quiz itself has answered when an event gets here.
  const answered = (event, given) => {
    const question = event.target.closest(".question"), verdict = question.querySelector(".verdict strong");
    if (!verdict) return; // what was typed is no answer
    const answers = { ...kept.json(name, {}).answers };
    answers[questions.indexOf(question) + 1] = { given, right: verdict.classList.contains("good") };
    note({ answers });
  };
  quiz.addEventListener("click", (event) => {
    const option = event.target.closest(".option");
    if (option) answered(event, option.querySelector("b").textContent);
    const result = quiz.querySelector(".score:not([hidden])")?.dataset;
    if (!result) return;
    const [right, of] = [Number(result.right), Number(result.count)], best = kept.json(name, {}).best;
    note({ best: [Math.max(right, Number(best?.[0]) || 0), of] });
  });
  quiz.addEventListener("submit", (event) => answered(event, event.target.elements.number.value.trim()));

  const before = kept.json(name, {}).answers ?? {};
  for (const [at, question] of questions.entries()) {
    const { given, right } = before[at + 1] ?? {};
    if (given === undefined) continue;
    const last = document.createElement("span");
    last.className = "last-time";
    last.textContent = filled(right ? WORDS.last_right : WORDS.last_wrong, { given });
    question.querySelector(".count").append(last);
  }
}

// -- the contents -----------------------------------------------------------------------------------------------------

const keeping = document.querySelector(".keeping");
if (keeping) {
  const numExercises = JSON.parse(keeping.dataset.exercises), said = keeping.querySelector(".said");
  const refresh = () => {
    refreshProgress();
    for (const cell of document.querySelectorAll(".contents td:first-child")) {
      const number = Number(cell.textContent), done = [];
      if (!(number in numExercises)) continue;
      const { best } = kept.json(`quiz-${number}`, {}), solved = kept.json(`solved-${number}`, []);
      if (kept.get(`read-${number}`) !== null) done.push("read");
      if (best) done.push(`quiz ${best[0]} of ${best[1]}`);
      if (solved.length) done.push(`exercises ${solved.length} of ${numExercises[number]}`);
      const title = cell.nextElementSibling;
      title.querySelector(".done")?.remove();
      if (!done.length) continue;
      const line = document.createElement("small");
      line.className = "done";
      line.textContent = done.join(" · ");
      title.append(line);
    }
  };
  // How far one is, and the first chapter that has not been read.
  const begin = document.querySelector(".hero .primary"), beginning = [begin.href, begin.textContent];
  const refreshProgress = () => {
    const numbers = Object.keys(numExercises), read = numbers.filter((number) => kept.get(`read-${number}`) !== null);
    const next = numbers.find((number) => !read.includes(number)), progress = document.querySelector(".hero .progress");
    progress.hidden = !read.length;
    progress.querySelector("progress").value = read.length;
    progress.querySelector("span").textContent = `${read.length} of ${numbers.length} chapters read`;
    const links = [...document.querySelectorAll(".contents td:first-child + td a")];
    const link = read.length && next ? links[Number(next) - 1] : null;
    begin.href = link ? link.href : beginning[0];
    begin.textContent = link ? `Continue with chapter ${next}` : beginning[1];
  };
  keeping.querySelector(".export").addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([kept.file()], { type: "application/json" }));
    link.download = "nanovllm-course.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  keeping.querySelector("input").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    if (!file) return;
    try {
      const count = kept.takeIn(await file.text());
      said.textContent = `${count} ${count === 1 ? "thing was" : "things were"} taken in. What the file has replaced what was here.`;
      refresh();
    } catch (error) {
      said.textContent = error.message;
    }
    event.target.value = "";
  });
  keeping.hidden = false;
  refresh();
  addEventListener("storage", refresh); // another tab has noted something
}
