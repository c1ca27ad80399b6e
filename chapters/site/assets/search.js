// The search page: every section of search-index.js that has all the words, those first that have them in a heading.
"use strict";

const MOST_SHOWN = 30, AROUND = 90; // sections; characters of an excerpt on each side of a word

const form = document.querySelector(".search form"), input = form.elements.q;
const list = document.querySelector(".found"), status = document.querySelector(".num-found");
const sections = SECTIONS.map(([place, page, heading, text]) => ({
  place, page, heading, text, inTitle: `${page} ${heading}`,
}));

input.value = new URLSearchParams(location.search).get("q") ?? "";
input.addEventListener("input", search);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  search();
});
search();
input.focus();

function search() {
  const words = input.value.split(/\s+/).filter(Boolean);
  history.replaceState(null, "", words.length ? `?q=${encodeURIComponent(input.value)}` : location.pathname);
  const found = words.length ? ranked(words) : [];
  const more = found.length > MOST_SHOWN ? `, of which the first ${MOST_SHOWN} are shown` : "";
  status.textContent = !words.length ? "" : `${found.length} ${found.length === 1 ? "section" : "sections"}${more}`;
  list.replaceChildren(...found.slice(0, MOST_SHOWN).map(({ section }) => item(section, words)));
}

// The sections with all words, the best first. A word in a title counts ten times, a rare word more than a frequent one,
// and twice as much if the words stand together as they were typed.
function ranked(words) {
  const patterns = words.map(pattern), phrase = new RegExp(words.map(escaped).join("[^\\p{L}\\p{N}]+"), "iu");
  const counts = sections.map(({ inTitle, text }) =>
    patterns.map((each) => 10 * count(inTitle, each) + Math.min(9, count(text, each))));
  const rare = words.map((_, i) => Math.log(1 + sections.length / (1 + counts.filter((of) => of[i]).length)));
  return sections
    .map((section, at) => {
      const sum = counts[at].every(Boolean) ? counts[at].reduce((all, times, i) => all + times * rare[i], 0) : 0;
      const together = words.length > 1 && phrase.test(`${section.inTitle} ${section.text}`);
      return { section, score: together ? 2 * sum : sum };
    })
    .filter(({ score }) => score > 0)
    .sort((a, b) => b.score - a.score);
}

function escaped(word) {
  return word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
}

function count(text, pattern) {
  return text.match(pattern)?.length ?? 0;
}

// Where a word begins like this: after a hyphen and an underscore, too.
function pattern(word) {
  return new RegExp(/^[\p{L}\p{N}]/u.test(word) ? `(?<![\\p{L}\\p{N}])${escaped(word)}` : escaped(word), "giu");
}

function item({ place, page, heading, text }, words) {
  const element = document.createElement("li"), link = document.createElement("a"), excerpt = document.createElement("p");
  link.href = place;
  link.textContent = heading || page;
  element.append(link);
  if (heading) element.append(` ${page}`);
  const first = Math.min(...words.map((word) => text.search(pattern(word))).filter((at) => at >= 0));
  if (first < Infinity) {
    const from = Math.max(0, first - AROUND), to = first + 2 * AROUND;
    excerpt.append(from ? "… " : "", ...marked(text.slice(from, to), words), to < text.length ? " …" : "");
    element.append(excerpt);
  }
  return element;
}

// The words in it, marked.
function marked(text, words) {
  const anyWord = new RegExp(`(${words.map((word) => pattern(word).source).join("|")})`, "iu");
  return text.split(anyWord).map((part, number) => {
    if (number % 2 === 0) return part;
    const mark = document.createElement("mark");
    mark.textContent = part;
    return mark;
  });
}
