// The exercises: an editor whose text this browser keeps, and the chapter's checks, one task after another.

import { Python, loadingBar } from "./python.js";

const section = document.querySelector("section.exercises");
if (section) run(section);

function run(section) {
  const $ = (selector) => section.querySelector(selector);
  const chapter = Number(section.dataset.chapter), key = `nanovllm-exercise-${chapter}`;
  const editor = $("textarea"), bar = loadingBar(section), printed = $(".printed pre");
  const python = new Python({ progress: bar.progress, printed: (line) => print(line) });
  let stopping = null; // while checks run: a function that ends the one that is running

  $(".needs-server").hidden = true;
  $(".controls").hidden = false;
  editor.value = localStorage.getItem(key) ?? editor.defaultValue;
  number();
  editor.addEventListener("input", changed);
  editor.addEventListener("scroll", () => ($(".numbers").scrollTop = editor.scrollTop));
  editor.addEventListener("keydown", indent);
  $(".check").onclick = check;
  $(".stop").onclick = () => stopping?.("you stopped it");
  $(".download").onclick = download;
  $(".reset").onclick = () => {
    if (!confirm("Begin anew? What you have written here is lost.")) return;
    editor.value = editor.defaultValue;
    changed();
    localStorage.removeItem(key);
  };

  function changed() {
    try {
      localStorage.setItem(key, editor.value);
    } catch {
      $(".status").textContent = "This browser keeps nothing: download your file before you leave.";
    }
    number();
  }

  function number() {
    const count = editor.value.split("\n").length;
    $(".numbers").textContent = Array.from({ length: count }, (_, i) => i + 1).join("\n");
  }

  // Tab indents by four spaces, with Shift it takes them away; Enter goes on at the same indentation.
  let leaving = false;
  function indent(event) {
    if (event.key === "Escape") return void (leaving = true);
    const tab = event.key === "Tab" && !leaving;
    leaving = false;
    if (!tab && event.key !== "Enter") return;
    const { selectionStart: from, selectionEnd: to, value } = editor;
    const start = value.lastIndexOf("\n", from - 1) + 1;
    event.preventDefault();
    if (event.key === "Enter") {
      const line = value.slice(start, from);
      return insert(`\n${line.match(/^ */)[0]}${line.trimEnd().endsWith(":") ? "    " : ""}`);
    }
    if (from === to && !event.shiftKey) return insert(" ".repeat(4 - ((from - start) % 4)));
    const lines = value.slice(start, to).replace(event.shiftKey ? /^ {1,4}/gm : /^(?=.)/gm, event.shiftKey ? "" : "    ");
    editor.setSelectionRange(start, to);
    insert(lines);
    if (from !== to) editor.setSelectionRange(start, start + lines.length);
  }

  function insert(text) {
    // execCommand keeps the editor's undo history; setRangeText does not.
    if (!document.execCommand("insertText", false, text)) editor.setRangeText(text, editor.selectionStart, editor.selectionEnd, "end");
    changed();
  }

  function print(line) {
    $(".printed").hidden = false;
    if (printed.textContent.length < 20_000) printed.textContent += `${line}\n`;
  }

  function download() {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([editor.value], { type: "text/x-python" }));
    link.download = "exercise.py";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  async function ready() {
    if (python.worker) return;
    bar.begin();
    await python.start();
    bar.end();
  }

  async function check() {
    const source = editor.value, items = [...section.querySelectorAll(".tasks > li")];
    $(".check").disabled = true;
    printed.textContent = "";
    $(".printed").hidden = true;
    for (const item of items) show(item, null);
    let passed = 0;
    try {
      await ready();
      const tasks = await python.call({ do: "tasks", chapter });
      for (const [index, task] of tasks.entries()) {
        await ready(); // anew, if the last check had to be stopped
        $(".stop").hidden = false;
        const result = await grade(source, index, task);
        passed += result.status === "passed";
        show(items[index], result, task);
      }
      $(".status").textContent = `${passed} of ${tasks.length} exercises pass.`;
    } catch (error) {
      python.end("");
      bar.fail(error);
      $(".status").textContent = "";
    }
    $(".stop").hidden = true;
    $(".check").disabled = false;
  }

  // One task. A check that is not done in time is ended, and its worker with it.
  async function grade(source, index, task) {
    const limit = Number(section.dataset.limit);
    let number = 0, begun = performance.now(), stopped = "", loading = true;
    stopping = (why) => {
      stopped = why;
      python.end(why);
    };
    const clock = setInterval(() => {
      const seconds = (performance.now() - begun) / 1000;
      const what = loading ? "loading exercise.py" : task.titles[number];
      $(".status").textContent = `${task.name}: ${what}${seconds > 3 ? ` (${seconds.toFixed(0)} s)` : ""}`;
      if (seconds > limit) stopping(`it was not done after ${limit} s: is there a loop that never ends?`);
    }, 200);
    try {
      return await python.call({ do: "check", chapter, source, task: index }, (began) => {
        [number, begun, loading] = [began, performance.now(), false];
      });
    } catch (error) {
      if (!stopped) throw error;
      const problem = loading ? `exercise.py was stopped while it was loaded: ${stopped}` : stopped;
      return { status: "no", num_passed: number, problem, open: [] };
    } finally {
      clearInterval(clock);
      stopping = null;
    }
  }

  function show(item, result, task) {
    const [verdict, outcome] = [item.querySelector(".verdict"), item.querySelector(".outcome")];
    item.dataset.status = result?.status ?? "";
    verdict.textContent = outcome.textContent = "";
    if (!result) return;
    const count = `${result.num_passed - result.open.length} of ${task.titles.length} checks`;
    verdict.textContent = `${result.status === "passed" && result.open.length ? "passed here" : result.status}, ${count}`;
    const list = document.createElement("ul");
    task.titles.slice(0, result.num_passed + 1).forEach((title, number) => {
      const line = document.createElement("li");
      line.className = result.open.includes(number) ? "open" : number < result.num_passed ? "good" : "bad";
      line.textContent = title + (line.className === "open" ? ": needs a model, see below" : "");
      list.append(line);
    });
    outcome.append(list);
    if (result.problem) {
      const problem = document.createElement("pre");
      problem.className = "problem";
      problem.tabIndex = 0;
      problem.textContent = result.problem;
      outcome.append(problem);
    }
  }
}
