// The exercises: an editor whose text this browser keeps, and the chapter's checks, one task after another.

import { Python, loadingBar } from "./python.js";

const section = document.querySelector("section.exercises");
if (section) run(section);

function run(section) {
  const $ = (selector) => section.querySelector(selector);
  const chapter = Number(section.dataset.chapter), key = `nanovllm-exercise-${chapter}`;
  const editor = $("textarea"), bar = loadingBar(section);
  let saved = null; // what this tab knows to be kept
  let spare = null; // a promise of a Python that is ready and has run nothing
  let running = null, stopped = false; // the Python that checks a task; has the student stopped it?

  $(".needs-server").hidden = true;
  $(".controls").hidden = false;
  editor.value = saved = read();
  number();
  editor.addEventListener("input", changed);
  editor.addEventListener("scroll", () => ($(".numbers").scrollTop = editor.scrollTop));
  editor.addEventListener("keydown", indent);
  $(".check").onclick = check;
  $(".stop").onclick = () => {
    stopped = true;
    running.end("you stopped it");
  };
  $(".download").onclick = download;
  $(".reset").onclick = () => {
    if (!confirm("Start over? What you have written here will be lost.")) return;
    editor.value = editor.defaultValue;
    changed();
  };
  addEventListener("storage", compare); // another tab has written
  for (const details of section.querySelectorAll(".tasks details")) details.addEventListener("toggle", () => {
    if (!details.open) return;
    for (const other of section.querySelectorAll(".tasks details")) if (other !== details) other.open = false;
    lookAt(details.closest("li").dataset.task);
  });
  lookAt($(".tasks > li").dataset.task);
  // Of the last check: the text, the checks as they were then, and a result for each task.
  const kept = JSON.parse(remembered(`${key}-verdicts`));
  if (kept?.source === editor.value && kept.checks === checks()) conclude(kept.results);
  $(".theirs").onclick = () => {
    editor.value = saved = read();
    number();
    compare();
  };
  $(".mine").onclick = () => {
    saved = read();
    changed();
  };

  // All checks of this page: after a change of the course, what they were passed by may fail.
  function checks() {
    return [...section.querySelectorAll(".tasks > li")].map((item) => item.dataset.checks).join();
  }

  // The text that this browser keeps. A browser may forbid to ask for it.
  function read() {
    try {
      return localStorage.getItem(key) ?? editor.defaultValue;
    } catch {
      return saved ?? editor.defaultValue;
    }
  }

  // Has another tab written since this one read or wrote? Then one must choose.
  function compare() {
    const kept = read();
    if (kept === editor.value) saved = kept;
    $(".conflict").hidden = kept === saved;
    return kept === saved;
  }

  function changed() {
    number();
    if (!compare()) return;
    try {
      if (editor.value === editor.defaultValue) localStorage.removeItem(key);
      else localStorage.setItem(key, editor.value);
      saved = editor.value;
    } catch {
      $(".keeps").textContent = "This browser keeps nothing: download your file before you leave.";
    }
  }

  // A number for each line. The lines are there, too, unseen: on a phone they wrap as they do in the editor.
  function number() {
    $(".numbers").replaceChildren(...editor.value.split("\n").map((text) => {
      const line = document.createElement("span");
      line.textContent = text || " ";
      return line;
    }));
  }

  // The editor shows the function of the task that is open: where one writes, below its docstring.
  function lookAt(task) {
    const from = editor.value.search(new RegExp(`^(def|class) ${task}\\b`, "m"));
    if (from < 0) return;
    const [own] = editor.value.slice(from).split(/\n(?=def |class )/);
    const begin = from + (own.match(/^[^]*?"""[^]*?"""\n/)?.[0].length ?? 0);
    const line = editor.value.slice(0, begin).split("\n").length - 1;
    editor.scrollTop = $(".numbers").children[line].offsetTop - editor.clientHeight / 3;
  }

  // Tab indents by four spaces, with Shift it takes them away; Enter goes on at the same indentation.
  let leaving = false;
  function indent(event) {
    if (event.isComposing || event.key === "Shift") return; // Enter ends a word of an input method; Shift comes before Tab
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
    if (document.execCommand("insertText", false, text)) return; // the event "input" comes, too
    editor.setRangeText(text, editor.selectionStart, editor.selectionEnd, "end");
    changed();
  }

  // What the tasks print. However much that is, it is shown five times a second.
  let outputs = [], timer = 0;
  function print(task, text) {
    if (outputs.at(-1)?.task !== task) outputs.push({ task, text: "" });
    outputs.at(-1).text += text;
    timer ||= setTimeout(showPrinted, 200);
  }

  function showPrinted() {
    clearTimeout(timer);
    timer = 0;
    $(".printed").hidden = !outputs.length;
    $(".printed pre").textContent = outputs.map(({ task, text }) => `${task}:\n${text.replace(/\n?$/, "\n")}`).join("\n");
  }

  function download() {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([editor.value], { type: "text/x-python" }));
    link.download = "exercise.py";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  async function boot() {
    const python = new Python();
    await python.start(bar.progress);
    return python;
  }

  // A Python in which nothing has happened yet. The next one starts meanwhile.
  async function fresh() {
    const python = await (spare ?? boot());
    spare = boot();
    spare.catch(() => (spare = null)); // it is asked for again, and then one is told
    return python;
  }

  async function check() {
    const source = editor.value, items = [...section.querySelectorAll(".tasks > li")];
    const pressed = document.activeElement === $(".check"); // a disabled button loses the focus
    $(".check").disabled = true;
    $(".status").textContent = "Starting Python";
    outputs = [];
    showPrinted();
    for (const item of items) show(item, null);
    $(".next.outcome").replaceChildren();
    $(".verdicts").hidden = true;
    const results = {};
    let result = null;
    stopped = false;
    try {
      if (!spare) bar.begin();
      for (const [index, item] of items.entries()) {
        if (!result?.neverLoads) {
          running = await fresh();
          bar.end();
          if (stopped) break;
          result = await grade(running, source, index, item);
        }
        show(item, result);
        results[item.dataset.task] = result;
        if (stopped) break;
      }
      conclude(results);
      if (stopped) $(".status").textContent = "Stopped.";
      else remember(`${key}-verdicts`, JSON.stringify({ source, checks: checks(), results }));
    } catch (error) {
      bar.fail(error);
      $(".status").textContent = "";
    }
    running?.end("");
    showPrinted();
    $(".stop").hidden = true;
    $(".check").disabled = false;
    if (pressed && document.activeElement === document.body) $(".check").focus({ preventScroll: true });
  }

  // What a check has found: results of tasks, by their names.
  function conclude(results) {
    const items = [...section.querySelectorAll(".tasks > li")];
    for (const item of items) show(item, results[item.dataset.task]);
    const next = items.find((item) => item.dataset.status !== "passed");
    if (next) {
      next.querySelector("details").open = true;
      const name = document.createElement("code"), verdict = next.querySelector(".verdict").textContent;
      name.textContent = next.dataset.task;
      $(".next.outcome").append(name, ` ${verdict}`, ...next.querySelector(".outcome").cloneNode(true).childNodes);
      $(".next.outcome").append(next.querySelector(".again").cloneNode(true));
    }
    for (const [number, line] of [...$(".verdicts").children].entries()) {
      line.dataset.status = items[number].dataset.status;
      line.querySelector(".verdict").textContent = items[number].querySelector(".verdict").textContent;
      if (line.querySelector(".ours")) line.querySelector(".ours").hidden = line.dataset.status !== "passed";
    }
    $(".verdicts").hidden = false;
    const count = items.filter((item) => item.dataset.status === "passed").length;
    $(".status").textContent = `${count} of ${items.length} exercises pass.`;
  }

  // One task. Whatever happens to its Python, that is its result, and that of no other.
  async function grade(python, source, index, item) {
    const name = item.dataset.task, checks = JSON.parse(item.dataset.checks), limit = Number(section.dataset.limit);
    let number = -1, begun = performance.now(), late = false; // number: of the check, after exercise.py is loaded
    python.printed = (text) => print(name, text);
    const clock = setInterval(() => {
      const seconds = (performance.now() - begun) / 1000;
      const what = `${name}: ${checks[number]?.title ?? "loading exercise.py"}`;
      if ($(".status").textContent !== what) $(".status").textContent = what; // what is written is read aloud, too
      $(".seconds").textContent = seconds > 3 ? `(${seconds.toFixed(0)} s)` : "";
      late = seconds > limit;
      if (late) python.end(`it was not done after ${limit} s: does it wait for something, or is there a loop that never ends?`);
    }, 200);
    $(".stop").hidden = false;
    try {
      const result = await python.call({ do: "check", chapter, source, task: index }, (began) => {
        [number, begun] = [began, performance.now()];
      });
      if (!Array.isArray(result?.open)) throw new Error("the grader itself was changed");
      return result;
    } catch (error) {
      const what = error.message.trim().split("\n").at(-1);
      const why = late || stopped ? what : `the program was ended before it was done (${what})`;
      const problem = number < 0 ? `exercise.py cannot be loaded: ${why}` : why;
      const again = stopped ? "" : checks[number]?.section, neverLoads = late && number < 0;
      return { status: "no", num_passed: Math.max(0, number), problem, section: again, open: [], neverLoads };
    } finally {
      python.end("");
      clearInterval(clock);
      $(".seconds").textContent = "";
    }
  }

  function show(item, result) {
    const checks = JSON.parse(item.dataset.checks);
    const [verdict, again, outcome] = [".verdict", ".again", ".outcome"].map((name) => item.querySelector(name));
    item.dataset.status = result?.status ?? "";
    verdict.textContent = again.textContent = outcome.textContent = "";
    if (!result) return;
    if (result.section) {
      const link = document.createElement("a"), known = checks.find(({ section }) => section === result.section);
      if (known) link.href = known.place; // a hint may name a section of its own: that is a text and no link
      link.textContent = result.section;
      again.append("Read again: ", link);
    }
    const count = `${result.num_passed - result.open.length} of ${checks.length} checks`;
    const needs = result.open.length ? `; ${result.open.length} check${result.open.length > 1 ? "s need" : " needs"} a model` : "";
    verdict.textContent = `${result.status === "passed" && needs ? "passed here" : result.status}, ${count}${needs}`;
    const list = document.createElement("ul");
    checks.slice(0, result.num_passed + 1).forEach(({ title }, number) => {
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
