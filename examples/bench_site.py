"""How long a reader waits: for a page's first paint, for a lab after the click, for the verdict on each exercise.

    python examples/bench_site.py
    python examples/bench_site.py --with-model

Builds the site with its runtime (python -m chapters site --offline) into a temporary folder, serves it from this
machine and opens it in chromium with Playwright, each time with an empty browser cache. Prints a line for each page, in
milliseconds or seconds from the start of the navigation or from the click; no network is in these numbers. Our
solutions are what is graded: one click, and the seconds after it at which each exercise has its verdict. The first has
loaded Python, too. With the demo model beside the pages it prints instead how fast that generates in the browser,
without draft tokens: what chapter 13's page says itself.
"""

import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from measuring import arguments, needs, positive

sys.path.insert(0, str(Path(__file__).parents[1]))  # chapters/ is not installed

from chapters.course import ROOT
from chapters.site.build import build
from chapters.site.runtime import CHAPTERS, FILES, GRADED
from chapters.site.server import chromium, served

FIRST_PAINT = """() => new Promise(resolve => new PerformanceObserver(list => resolve(list.getEntries()[0].startTime))
    .observe({ type: "paint", buffered: true }))"""
FIRST_RESULT = """() => {
    const option = document.querySelector(".option");
    option.click();
    if (!option.closest(".question").querySelector(".verdict").textContent) throw new Error("no verdict");
    return performance.now();
}"""
READY = """() => new Promise(resolve => {
    const started = performance.now(), panels = document.querySelector(".panels");
    new MutationObserver(() => resolve(performance.now() - started)).observe(panels, { childList: true });
    document.querySelector(".start").click();
})"""
VERDICTS = """source => new Promise(resolve => {
    const items = [...document.querySelectorAll(".tasks > li")], verdicts = [], started = performance.now();
    for (const item of items)
        new MutationObserver(() => {
            if (!item.dataset.status) return;
            verdicts.push([(performance.now() - started) / 1000, item.dataset.status]);
            if (verdicts.length === items.length) resolve(verdicts);
        }).observe(item, { attributeFilter: ["data-status"] });
    document.querySelector("textarea").value = source;
    document.querySelector(".check").click();
})"""
ENDED = "document.querySelector('.model .said').textContent.startsWith('95 tokens')"


def main() -> None:
    parser = arguments(__doc__, model=None)
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="take the median of N (default: 3)")
    parser.add_argument("--with-model", action="store_true", help="the demo model in the browser, alone")
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="a site that was built with --offline")
    parser.add_argument("chapters", nargs="*", type=int, metavar="CHAPTER", help="(default: all)")
    args = parser.parse_args()
    chapters = {int(name[2:4]): name for name in sorted(GRADED)}
    if unknown := set(args.chapters) - set(chapters):
        parser.error(f"no page grades chapter {min(unknown)}; there are {', '.join(map(str, chapters))}")
    names = [name for number, name in chapters.items() if not args.chapters or number in args.chapters]
    with needs("playwright"):
        from playwright.sync_api import sync_playwright

    with ExitStack() as stack:
        folder = args.site or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address, playwright = stack.enter_context(served(folder)), stack.enter_context(sync_playwright())
        if not args.site:
            build(folder, offline=True, with_model=args.with_model)
        browser = playwright.chromium.launch(executable_path=chromium())

        def measure(path: str, script: str) -> float:
            """Milliseconds, median."""
            times = []
            for _ in range(args.repeats):
                context = browser.new_context()
                page = context.new_page()
                page.goto(f"{address}/{path}")
                times.append(page.evaluate(script))
                context.close()
            return statistics.median(times)

        if args.with_model:
            page = browser.new_page()
            page.goto(f"{address}/ch13_guess_and_check/lab.html")
            page.click("text=Fetch the model")
            page.wait_for_selector(".shown .panel", timeout=300_000)
            page.fill("[data-name=num_draft_tokens]", "0")
            page.click("[data-act=run]")
            page.wait_for_function(ENDED, timeout=300_000)
            print(f"chromium {browser.version}: {page.inner_text('.model .said')}")
            return
        megabytes = sum(file.size for file in FILES) / 1e6
        print(f"first paint, or a lab ready after the click ({megabytes:.1f} MB from this machine)")
        for path in ("index.html", *(f"{name}/index.html" for name in names)):
            print(f"{path:40} first paint {measure(path, FIRST_PAINT):6.0f} ms")
        path = "ch01_inference/index.html"
        print(f"{path:40} first result {measure(path, FIRST_RESULT):5.0f} ms, a verdict of its quiz")
        for name in (name for name in names if name in CHAPTERS):
            print(f"{f'{name}/lab.html':40} lab ready   {measure(f'{name}/lab.html', READY) / 1e3:6.2f} s")
        for name in (name for name in names if (ROOT / name / "solution.py").exists()):  # not in a student's edition
            context = browser.new_context()
            page = context.new_page()
            page.goto(f"{address}/{name}/exercises.html")
            verdicts = page.evaluate(VERDICTS, (ROOT / name / "solution.py").read_text("utf-8"))
            context.close()
            # What needs a model stays open in a page.
            assert {status for _, status in verdicts} <= {"passed", "open"}, f"{name}: {verdicts}"
            print(f"{f'{name}/exercises.html':40} graded after {', '.join(f'{at:.1f}' for at, _ in verdicts)} s")
        browser.close()


if __name__ == "__main__":
    main()
