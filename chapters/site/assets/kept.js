// What this browser keeps of a reader: texts by name. Other pages of the host have names of their own.
//   read-4             chapter 4 has been read
//   quiz-4             its quiz: the last answers, and the best result
//   solved-4           its exercises that passed
//   exercise-4         its exercise.py as the reader has written it
//   expected-4-NAME    what the reader expected before a table
"use strict";

const PREFIX = "nanovllm-", NAMES = /^(read|quiz|solved|exercise|expected)-\d+(-[0-9a-f]+)?$/;

const kept = {
  // null where nothing is kept, or where this browser forbids to ask.
  get(name) {
    try {
      return localStorage.getItem(PREFIX + name);
    } catch {
      return null;
    }
  },

  // null as the text: it is forgotten. Returns: is it kept now?
  set(name, text) {
    try {
      if (text === null) localStorage.removeItem(PREFIX + name);
      else localStorage.setItem(PREFIX + name, text);
      return true;
    } catch {
      return false;
    }
  },

  // What was kept as JSON; `otherwise` where it is none, or of another kind.
  json(name, otherwise) {
    try {
      const found = JSON.parse(kept.get(name));
      return found && Array.isArray(found) === Array.isArray(otherwise) && typeof found === "object" ? found : otherwise;
    } catch {
      return otherwise;
    }
  },

  all() {
    const found = {};
    try {
      for (const key of Object.keys(localStorage).sort()) {
        const name = key.slice(PREFIX.length);
        if (key.startsWith(PREFIX) && NAMES.test(name)) found[name] = localStorage.getItem(key);
      }
    } catch {
      // nothing is kept
    }
    return found;
  },

  // A file that says what all() gave, as text.
  file: () => JSON.stringify({ course: "nanovllm", kept: kept.all() }, null, 1),

  // Take in such a file: what it has replaces what is here. Returns how many things; throws an Error that says why not.
  takeIn(text) {
    let file;
    try {
      file = JSON.parse(text);
    } catch {
      throw new Error("This file is no JSON.");
    }
    const entries = Object.entries(file?.course === "nanovllm" && file.kept ? file.kept : {});
    if (!entries.length) throw new Error("There is nothing in this file that a page of the course has saved.");
    for (const [name, value] of entries)
      if (!NAMES.test(name) || typeof value !== "string") throw new Error(`This file has an entry of another kind: ${name}`);
    for (const [name, value] of entries)
      if (!kept.set(name, value)) throw new Error("This browser keeps nothing, or has no room left.");
    return entries.length;
  },
};
