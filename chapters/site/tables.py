"""Tables of labs as HTML, and what a text quotes from a lab.

On a phone a table scrolls below its first column, which stays; one of texts, which would be too wide for that, has its
rows below each other, each cell behind its heading.
"""

import html
import re
from itertools import groupby

from chapters.recording import Told
from chapters.sheet import MEASURED, Sheet, read

LONG = 20  # letters of a cell of text


def draw(sheet: Sheet) -> str:
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
        body += f"<tr{measured}>{heading(cells[0], 'row')}{drawn}</tr>\n"
    long = [at for at in kept if at not in numbers and max(len(row[at]) for row in sheet.rows) > LONG]
    kind = "lab stack" if len(long) > 1 and sheet.columns else "lab"
    title = f"<caption>{html.escape(sheet.title)}</caption>" if sheet.title else ""
    head = f"<thead><tr>{head}</tr></thead>" if sheet.columns else ""
    name = html.escape(", ".join(filter(None, columns))) or "rows of a table"
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="Table: {name}"><table class="{kind}">{title}{head}'
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def heading(text: str, scope: str, is_number: bool = False) -> str:
    kind = " class=n" if is_number else ""
    text = html.escape(text.replace(MEASURED, "").strip())
    return f"<th{kind} scope={scope}>{text}</th>" if text else "<td></td>"


def quoted(quote: str, told: list[Told]) -> str:
    """A quote from a lab, drawn as the lab's own page draws it. Headings that were not quoted come from the lab."""
    says = [bare(what) for kind, what in told if kind == "say"]

    def kind_of(line: str) -> tuple[str, int]:
        """A line of a table with so many cells, of the paragraph with this number, or of something drawn."""
        if re.search("[┃│━]", line):
            return "table", 0 if "━" in line else len(re.findall("[┃│]", line))
        words = bare(line).strip()
        return next((("say", at) for at, said in enumerate(says) if words and words in said), ("", 0))

    drawn = ""
    for block in re.split(r"\n\s*\n", quote.strip("\n")):
        lines = block.split("\n")
        pieces = [(("", 0), lines)] if "├" in block else [(kind, [*each]) for kind, each in groupby(lines, kind_of)]
        for (kind, _), piece in join_rules(pieces):
            text = "\n".join(piece)
            if (sheet := read(text) if kind == "table" else None) is not None:
                sheet.columns = sheet.columns or columns_of(sheet, told)
                drawn += draw(sheet)
            else:
                drawn += paragraph(" ".join(text.split())) if kind == "say" else printed(text)
    return drawn


Piece = tuple[tuple[str, int], list[str]]


def join_rules(pieces: list[Piece]) -> list[Piece]:
    """The line below a table's headings, and the one between its sections, belong to the rows around them."""
    joined: list[Piece] = []
    for kind, lines in pieces:
        before = joined[-1] if joined else (("", 0), [])
        if kind[0] == before[0][0] == "table" and 0 in (kind[1], before[0][1], kind[1] - before[0][1]):
            joined[-1] = (max(kind, before[0]), before[1] + lines)
        else:
            joined.append((kind, lines))
    return joined


def columns_of(quote: Sheet, told: list[Told]) -> list[str]:
    """Of the table in the recorded lab that has such rows; measured numbers were others."""
    labels = {row[0] for row in quote.rows if row[0]}
    for kind, what in told:
        if kind == "table" and len(what["columns"]) == quote.num_columns and labels <= {row[0] for row in what["rows"]}:
            return what["columns"]
    return []


def bare(text: str) -> str:
    """The words, whatever was measured."""
    return re.sub(r"[-+\d.,%]+|\s+", " ", text)


def paragraph(text: str) -> str:
    kind = ' class="measured"' if MEASURED in text else ""
    return f"<p{kind}>{html.escape(text)}</p>"


def printed(text: str) -> str:
    """As the terminal had it, with the lines marked that were measured."""
    lines = (html.escape(line) for line in text.rstrip("\n").split("\n"))
    marked = "\n".join(f'<span class="measured">{line}</span>' if MEASURED in line else line for line in lines)
    return f'<pre class="printed" tabindex="0">{marked}</pre>\n'
