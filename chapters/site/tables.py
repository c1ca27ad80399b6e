"""Tables of labs as HTML, and what a text quotes from a lab.

On a phone a table scrolls below its first column, which stays; one of texts, which would be too wide for that, has its
rows below each other, each cell after its heading.
"""

import html
import re

from chapters.recording import Told
from chapters.sheet import MEASURED, RULE, Sheet, read
from chapters.words import ENGLISH, Captions, Words

LONG = 20  # letters of a cell of text
DRAWN = re.compile("\\S {2,}\\S|[\u2500-\u259f]")  # columns, or lines and bars
BLOCKS = re.compile(r"(?:[ \d]{2}\d .{7} ){4,}[ \d]{2}\d .{1,7}")  # of a pool, in a row: draw.py
FOUR_BLOCKS = 48  # letters


def draw(sheet: Sheet, words: Words = ENGLISH) -> str:
    """Rows that were measured are marked; a column that says nothing else is left out."""
    columns = sheet.columns or [""] * sheet.num_columns
    kept = [at for at, name in enumerate(columns) if name or {row[at] for row in sheet.rows} - {"", MEASURED}]
    numbers = {at for at in kept if at and sheet.holds_numbers(at)}
    head = "".join(heading(columns[at], "col", at in numbers) for at in kept)
    body = ""
    for row in sheet.rows:
        measured = ' class="measured"' if any(MEASURED in cell for cell in row) else ""
        cells = [row[at].replace(MEASURED, "").strip() for at in kept]
        drawn = "".join(
            f'<td{" class=n" if at in numbers else ""} data-name="{html.escape(columns[at])}">{html.escape(cell)}</td>'
            for at, cell in zip(kept[1:], cells[1:], strict=True)
        )
        name = row[kept[0]].replace(MEASURED, "").rstrip()
        body += f"<tr{measured}>{heading(cells[0], 'row', indent=len(name) - len(name.lstrip()))}{drawn}</tr>\n"
    long = [at for at in kept if at not in numbers and max(len(row[at]) for row in sheet.rows) > LONG]
    kind = "lab stack" if len(long) > 1 and sheet.columns else "lab"
    title = f"<caption>{html.escape(sheet.title)}</caption>" if sheet.title else ""
    head = f"<thead><tr>{head}</tr></thead>" if sheet.columns else ""
    columns = [html.escape(column) for column in columns if column]
    name = words("page.table_of", columns=", ".join(columns) or words("page.rows_of_a_table"))
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{name}"><table class="{kind}">{title}{head}'
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def heading(text: str, scope: str, is_number: bool = False, indent: int = 0) -> str:
    """indent: of a row's name that belongs to a row above, in letters."""
    kind = " class=n" if is_number else ""
    kind += f' class="in" style="--in: {indent}"' if indent > 1 else ""  # one letter aligns 10 below 100
    text = html.escape(text.replace(MEASURED, "").strip())
    return f"<th{kind} scope={scope}>{text}</th>" if text else "<td></td>"


Kind = tuple[str, int]  # table, and the number of its cells; say, and the number of the paragraph; or nothing of both


def quoted(quote: str, told: list[Told], captions: Captions | None = None, words: Words = ENGLISH) -> str:
    """A quote from a lab, drawn as the lab's own page draws it. Headings that were not quoted come from the lab."""
    drawn, says = "", [bare(what) for kind, what in told if kind == "say"]
    says += [bare(what["title"]) for kind, what in told if kind == "histogram"]
    prints = {bare(line) for kind, what in told if kind == "print" for line in what.split("\n")}
    for block in re.split(r"\n\s*\n", quote.strip("\n")):
        for kind, text in pieces(block, says, prints):
            if (sheet := read(text) if kind == "table" else None) is not None:
                sheet.columns = sheet.columns or columns_of(sheet, told)
                drawn += draw(retold(sheet, captions), words)
            else:
                said = " ".join(text.split())
                drawn += paragraph(captions(said) if captions else said) if kind == "say" else printed(text)
    return drawn


def retold(sheet: Sheet, captions: Captions | None) -> Sheet:
    """The same table with its headings and texts in another language."""
    if captions is None:
        return sheet
    rows = [[captions(cell) for cell in row] for row in sheet.rows]
    return Sheet([captions(name) for name in sheet.columns], rows, captions(sheet.title))


def pieces(block: str, says: list[str], prints: set[str]) -> list[tuple[str, str]]:
    """Its tables, its paragraphs, and what else was printed, in their order."""
    if "├" in block:  # a tree
        return [("", block)]
    found: list[tuple[Kind, str]] = []
    for line in block.split("\n"):
        before, text = found[-1] if found else (("", 0), "")
        kind = kind_of(line, says, prints)
        is_table = kind[0] == before[0] == "table" and 0 in (kind[1], before[1], kind[1] - before[1])
        if is_table or (before[0] == "say" and bare(f"{text} {line}") in says[before[1]]) or (found and kind == before):
            found[-1] = (before if before[0] == "say" else max(kind, before)), f"{text}\n{line}"
        else:
            found.append((kind, line))
    return [(kind, text) for (kind, _), text in found]


def kind_of(line: str, says: list[str], prints: set[str]) -> Kind:
    """The line below a table's headings, or between its sections, belongs to rows of any number of cells."""
    if re.search("[┃│━─]", line):
        return "table", 0 if RULE.fullmatch(line) else len(re.findall("[┃│]", line))
    words = bare(line)
    is_long = len(re.findall(r"[^\W\d_]{2,}", words)) > 2  # "none." may be in any paragraph
    is_said = is_long and words not in prints
    return next((("say", at) for at, said in enumerate(says) if is_said and words in said), ("", 0))


def columns_of(quote: Sheet, told: list[Told]) -> list[str]:
    """Of the table in the recorded lab that has such rows; measured numbers were others."""
    labels = {row[0].strip() for row in quote.rows if row[0]}
    for kind, what in told:
        if kind != "table" or len(what["columns"]) != quote.num_columns:
            continue
        if labels <= {row[0].strip() for row in what["rows"]}:
            return what["columns"]
    return []


def bare(text: str) -> str:
    """The words, whatever was measured."""
    return " ".join(re.sub(r"[-+\d.,%]+", " ", text).split())


def paragraph(text: str) -> str:
    kind = ' class="measured"' if MEASURED in text else ""
    return f"<p{kind}>{html.escape(text)}</p>"


def printed(text: str) -> str:
    """As the terminal had it, with the lines marked that were measured. Sentences may wrap on a phone, and blocks of a
    pool after four; where the place of a letter says something, all is drawn smaller."""
    drawn, narrow = [], 0
    lines = text.rstrip("\n").split("\n")
    for line in lines:
        parts = re.findall(f".{{1,{FOUR_BLOCKS}}}", line) if BLOCKS.fullmatch(line) else [line]
        narrow = max(narrow, *map(len, parts))
        shown = html.escape(line)
        if parts[1:]:
            shown = "".join(f'<span class="four">{html.escape(part)}</span>' for part in parts)
        drawn.append(f'<span class="measured">{shown}</span>' if MEASURED in line else shown)
    marked = "\n".join(drawn)
    kind = "printed" if DRAWN.search(text) else "printed sentences"
    columns = max(map(len, lines))
    return f'<pre class="{kind}" style="--columns: {columns}; --narrow: {narrow}" tabindex="0">{marked}</pre>\n'
