"""Structural tags: the texts that one lets a model write, and those that are none, each refused with a reason."""

from typing import Any

import pytest

from nanovllm.features.grammar.grammar import GrammarCompiler
from nanovllm.features.grammar.tags import lark_of
from nanovllm.sampling_params import StructuredOutputsParams
from tests.checkpoints import make_tokenizer

EOS = 1
ANY = {"type": "any_text"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def triggered(trigger: str, *tags: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": [trigger], "tags": [*tags], **more}


@pytest.fixture(scope="module")
def compiler():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])  # as Qwen3's have them
    return GrammarCompiler(tokenizer, len(tokenizer), {EOS})


def check(compiler: GrammarCompiler, form: Any, whole: list[str], refused: list[str]) -> None:
    """The texts that are whole answers of this form, and those that no answer begins with."""
    grammar = compiler.compile(StructuredOutputsParams(structural_tag={"format": form}))
    for text in whole + refused:
        token_ids = compiler.tokenizer.encode(text, add_special_tokens=False)
        possible = grammar.possible([], token_ids)
        assert (possible == token_ids) is (text in whole), text
        if text in whole:
            assert grammar.is_complete(token_ids) or grammar.possible(token_ids, [EOS]) == [EOS], text


def test_text_before_a_special_token_in_an_end(compiler):
    """It may come in the text before, too: only with the token after it is it the end."""
    end = "\n</think>\n\n"
    texts = ["<think>\nI see.\nTwo\n\ngulls\n</think>\n\n", "<think>\n\n</think>\n\n"]
    no_ends = ["<think>\nI see.</think>", "<think>\nI see.\n</think>so", f"{texts[0]}so"]
    check(compiler, tag("<think>\n", ANY, end), texts, no_ends)
    fitting = tag("<think>\n", ANY | {"fits": ["(?s:.{0,9})"]}, end)
    check(compiler, fitting, ["<think>\na\nb\nc\n</think>\n\n"], texts[:1])


def test_text_before_a_special_token_in_a_trigger(compiler):
    form = triggered("\n<tool_call>", tag("\n<tool_call>", NUMBER, "</tool_call>"))
    texts = ["I see.\nSo\n", "I\nsee.\n<tool_call>5</tool_call> so\nor"]
    check(compiler, form, texts, ["a\n<tool_call>x", "a<tool_call>"])


CALLS = triggered("[f", tag("[f=a]", NUMBER, "[/f]"))
ENDED = {
    "a sequence": (tag("<", sequence(const("a"), ANY), "."), ["<axy.", "<a."], ["<a.x", "<x"]),
    "alternatives": (tag("<", {"type": "or", "elements": [NUMBER, ANY]}, "."), ["<5.", "<xy."], ["<5.x", "<x.x"]),
    "tags in a text": (tag("<", CALLS, "."), ["<.", "<x[f=a]5[/f]y.", "<[f=a]5[/f]xy[f=a]6[/f]."], ["<.x", "<[f=a]x"]),
    "one tag": (
        tag("<", CALLS | {"stop_after_first": True}, "."),
        ["<.", "<xy.", "<x[f=a]5[/f]."],
        ["<.x", "<[f=a]5[/f]x"],
    ),
    "one tag at least": (
        tag("<", CALLS | {"stop_after_first": True, "at_least_one": True}, "."),
        ["<[f=a]5[/f]."],
        ["<.", "<x", "<[f=a]5[/f]x"],
    ),
    "one tag or more": (
        tag("<", CALLS | {"at_least_one": True}, "."),
        ["<[f=a]5[/f].", "<[f=a]5[/f]x[f=a]6[/f]y."],
        ["<.", "<x"],
    ),
    "a special token": (
        tag("<think>", CALLS, "\n</think>"),
        ["<think>\n</think>", "<think>a\nb[f=a]5[/f]\nc\n</think>"],
        ["<think>a</think>", "<think>\n[f=a]x"],
    ),
    "a const_string": (
        sequence(const("<think>"), ANY, const("</think>"), NUMBER),
        ["<think>so\nor</think>5"],
        ["<think></think>x"],
    ),
    "a const_string of letters": (sequence(ANY, const("so "), const("x")), ["so x", "a\nso x"], ["so a", "so xx"]),
    "both": (tag("<", sequence(sequence(CALLS), const(":")), "."), ["<x:.", "<[f=a]5[/f]:."], ["<:x", "<.:x"]),
}


@pytest.mark.parametrize("form, whole, refused", ENDED.values(), ids=ENDED)
def test_what_comes_after_ends_a_text(compiler, form, whole, refused):
    check(compiler, form, whole, refused)


@pytest.mark.parametrize(
    "form",
    [
        sequence(ANY, NUMBER),
        sequence(CALLS, CALLS),
        sequence(tag("<", CALLS, ""), NUMBER),
        sequence(sequence(NUMBER, {"type": "or", "elements": [NUMBER, ANY]}), NUMBER),
        triggered("<", tag("<", sequence(const("a"), ANY), "")),
    ],
)
def test_a_text_that_could_not_end(compiler, form):
    with pytest.raises(ValueError, match="the text of any_text and triggered_tags must say where it ends: its tag has"):
        compiler.compile(StructuredOutputsParams(structural_tag={"format": form}))


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def grammar(text: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": text}


FORMS = {
    "a regular expression": (regex("a/b\n\\d+"), ["a/b\n55"], ["a/bx"]),
    "an end that fits it": (tag("<", regex(".*"), ">"), ["<>", "<ab>"], ["<a>b", "<a\n"]),
    "a special token after it": (
        tag("<think>", regex("(?s:.*)"), "\n</think>"),
        ["<think>a\nb\n</think>"],
        ["<think>a</think>"],
    ),
    "a quote in it and after it": (tag('"', regex(r'(\\"|[^"\\])*'), '"'), ['"a\\"b"'], ['"a"b']),
    "GBNF": (tag("<", grammar('root ::= n ("," n)*\nn ::= [0-9]+'), ">"), ["<5,66>"], ["<a", "<>"]),
    "Lark": (sequence(grammar('start: A "."\nA: /[ab]+/'), const("c")), ["ab.c"], ["c", "ab.d"]),
    "ends": (tag("<", NUMBER, [">", "</think>"]), ["<5>", "<5</think>"], ["<5.", "<5>5"]),
    "ends of a text": (
        tag("<", ANY, [">", "]", "\n</think>"]),
        ["<a]", "<a>", "<a\nb\n</think>"],
        ["<a]b", "<a>]", "<a</think>"],
    ),
    "ends of a text that fits": (
        tag("<", ANY | {"fits": [".{3}"]}, [">", "]"]),
        ["<abc>", "<abc]"],
        ["<a]c>", "<abcd"],
    ),
    "ends of tags": (tag("<", CALLS, [">", "\n</think>"]), ["<a[f=a]5[/f]\n\n</think>", "<b>"], ["<b>c"]),
}


@pytest.mark.parametrize("form, whole, refused", FORMS.values(), ids=FORMS)
def test_forms(compiler, form, whole, refused):
    check(compiler, form, whole, refused)


FIELDS = {
    "excludes": (ANY | {"excludes": ["gull", "</"]}, ["a gul", "a<b"], ["a gull", "</"]),
    "excludes and an end": (tag("<", ANY | {"excludes": ["gull"]}, ">"), ["<gul>"], ["<gull", "<a>b"]),
    "excludes between tags": (
        CALLS | {"excludes": ["gull"]},
        ["gul[f=a]5[/f]gul", "gul"],
        ["gull", "[f=a]5[/f]gull", "[f=a]5[/f][f=a]5[/f]gull"],
    ),
    "style": (
        {"type": "json_schema", "json_schema": {"properties": {"a": {"type": "integer"}}}, "style": "qwen_xml"},
        ["<parameter=a>\n5\n</parameter>\n"],
        ["{", "<parameter=a>\nx"],
    ),
    "defaults": (
        NUMBER | {"style": "json", "any_order": False, "max_whitespace_cnt": None, "excludes": []},
        ["5"],
        ["x"],
    ),
}


@pytest.mark.parametrize("form, whole, refused", FIELDS.values(), ids=FIELDS)
def test_fields(compiler, form, whole, refused):
    check(compiler, form, whole, refused)


@pytest.mark.parametrize(
    "form, said",
    [
        (CALLS | {"atleast_one": True}, "triggered_tags has no 'atleast_one' here; it has at_least_one, excludes"),
        (ANY | {"max_tokens": 0}, "any_text has no 'max_tokens' here"),
        (ANY | {"excludes": [""]}, "excludes must be a list of texts, none of them empty"),
        (NUMBER | {"style": "glm_xml"}, "style must be json or qwen_xml, found 'glm_xml'"),
        (sequence(ANY, const("a") | {"values": ["b"]}), "const_string has no 'values' here"),
        (triggered("<", tag("<", NUMBER, ">") | {"ends": "]"}), "tag has no 'ends' here"),
        (triggered("<", tag("<", NUMBER, ">") | {"type": "or"}), "this must be a tag, found"),
        (tag("<", NUMBER, []), "end must be a text, or a list of texts, none of them empty"),
        (regex("a(") | {"json_schema": {}}, "regex has no 'json_schema' here"),
        (regex("a("), "structural_tag cannot be used"),
        (grammar("root ::= ("), "structural_tag cannot be used"),
    ],
)
def test_fields_that_would_be_dropped(compiler, form, said):
    with pytest.raises(ValueError, match=said):
        compiler.compile(StructuredOutputsParams(structural_tag={"format": form}))


def nested(depth: int) -> dict[str, Any]:
    form: dict[str, Any] = {"type": "any_text"}
    for _ in range(depth):
        form = {"type": "sequence", "elements": [form]}
    return form


@pytest.mark.parametrize(
    "form", [{"type": []}, {"type": {}}, {"type": 1}, {}, None, "any_text", nested(1000), nested(5000)]
)
def test_no_format(form):
    with pytest.raises(ValueError, match=r"a format is an object|nested too deeply|it is not JSON"):
        lark_of({"type": "structural_tag", "format": form})
