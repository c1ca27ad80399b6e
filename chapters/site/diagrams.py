"""placeholder"""
import html


def draw(source: str) -> str:
    return f'<pre class="printed" tabindex="0">{html.escape(source)}</pre>\n'
