"""How long a reader waits: the first paint of a page of the course, and a lab from the click until it is drawn.

    python examples/bench_site.py
    python examples/bench_site.py --with-model

Builds the site with its runtime (python -m chapters site --offline) into a temporary folder, serves it from this
machine and opens it in chromium with Playwright, each time with an empty browser cache. Prints a line
for each page, in milliseconds or seconds; no network is in these numbers. With the demo model beside the pages it
prints instead how fast that generates in the browser, without guesses: what the page of chapter 13 says itself.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # chapters/ is not installed

from chapters.site.build import build
from chapters.site.runtime import CHAPTERS, FILES
from chapters.site.server import served

FIRST_PAINT = """() => new Promise(resolve => new PerformanceObserver(list => resolve(list.getEntries()[0].startTime))
    .observe({ type: "paint", buffered: true }))"""
READY = """() => new Promise(resolve => {
    const started = performance.now(), panels = document.querySelector(".panels");
    new MutationObserver(() => resolve(performance.now() - started)).observe(panels, { childList: true });
    document.querySelector(".start").click();
})"""
ENDED = "document.querySelector('.model .said').textContent.startsWith('95 tokens')"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="First paint of a page, and a lab from the click until it is drawn.")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="take the median of N (default: 3)")
    parser.add_argument("--with-model", action="store_true", help="the demo model in the browser, alone")
    parser.add_argument("chapters", nargs="*", type=int, metavar="CHAPTER", help="(default: 4 5 7)")
    args = parser.parse_args(argv)
    names = [name for name in CHAPTERS if not args.chapters or int(name[2:4]) in args.chapters]
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as address, sync_playwright() as playwright:
        build(Path(folder), offline=True, with_model=args.with_model)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))

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
            page.fill("[data-name=num_guesses]", "0")
            page.click("[data-act=run]")
            page.wait_for_function(ENDED, timeout=300_000)
            print(f"chromium {browser.version}: {page.inner_text('.model .said')}")
            return
        megabytes = sum(file.size for file in FILES) / 1e6
        print(f"first paint, or a lab ready after the click ({megabytes:.1f} MB from this machine)")
        for path in ("index.html", *(f"{name}/index.html" for name in names)):
            print(f"{path:40} first paint {measure(path, FIRST_PAINT):6.0f} ms")
        for name in names:
            print(f"{f'{name}/lab.html':40} lab ready   {measure(f'{name}/lab.html', READY) / 1e3:6.2f} s")
        browser.close()


if __name__ == "__main__":
    main()
