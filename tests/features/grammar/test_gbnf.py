"""GBNF: the language is llama.cpp's, one of characters. The slow twins: Python's re, a recognizer of all parses."""

import random
import re
from collections import defaultdict

import pytest

from nanovllm.features.grammar.oracle import Oracle
from nanovllm.features.grammar.sandboxed_grammars import answer
from nanovllm.features.grammar.trial import LIMITS

CHARACTERS = "abcéè"  # the last two begin with the same byte

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( pair ("," ws pair)* )? "}" ws
pair   ::= string ":" ws value
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws  # and no more
ws     ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""
root  ::= (sum "=" ws term "\n")+    # ws may take the line break, but need not
sum   ::= term ([-+*/] term)*
term  ::= name | num | "(" ws sum ")" ws
name  ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
PROGRAM = r"""
root      ::= statement+
statement ::= name ws "=" ws value ";" | "return" ws value ";" | "if" "(" value ")" "{" statement* "}"
value     ::= name | [0-9]+ | name "(" (value ("," ws value)*)? ")"
name      ::= [a-z]+
ws        ::= [ \n]*
"""
CHESS = r"""
root ::= (
  "1. " move " " move "\n"
  ([1-9] [0-9]? ". " move " " move "\n")+
)
move  ::= (pawn | piece | "O-O" "-O"?) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn  ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
"""
DOUBLED = "\n".join(["root ::= r0", *(f"r{n} ::= r{n + 1} [ab] r{n + 1} | r{n + 1}" for n in range(99)), 'r99 ::= "c"'])


def matcher_of(grammar: str):
    return Oracle(LIMITS).matcher(answer("convert", grammar, LIMITS)[0] + '\n%llguidance {"no_forcing": true}')


def accepts(matcher, text: str) -> bool:
    matcher, written = matcher.deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (r'root ::= "\u00e9ab"', ["éab"], ["\ue9ab"]),
        (r'root ::= "\x41\u000a\U0001F642" [\u0410-\u042F]', ["A\n🙂Б"], []),
        ('root ::= a b\na ::= [a-z]+\nb ::= "x"', ["abx", "xx"], ["ab", "x"]),
        ('root ::= ("in" | name) "t"\nname ::= [a-z]+', ["int", "intt", "at"], ["in", "t"]),
        ('root ::= "bcc" "bab" [bc] [ab] | "b" ("cc" | [^a])', ["bcc", "bb"], ["bccb"]),
        ('root ::= "(" root ")" | [a-z]+ "x"', ["((axbx))"], ["(a)", "(ax"]),
        ('root ::= [a-z]+ tail\ntail ::= "x" tail | "y"', ["ay", "axxy", "yyxy"], ["y", "ax"]),
        ('root ::= "é" root | "è" [a-c]*', ["ééèab"], ["éé"]),
        ('root ::= (("a")+)? "b"{2}{2} "c"+?', ["bbbb", "aabbbbcc"], ["bb", "a"]),
        ('root ::= "a"{0} "b"{0,0} "c"{ 1 , } (root "d"){0,0}', ["c", "cc"], ["", "ac", "cd"]),
        ('root ::= "x"{1000,1000000}', ["x" * 1000], ["x" * 999]),
        ('root ::= ("a" root){2,2000000} | "b"', ["b", "abab", "ababab"], ["ab"]),
        ("root ::= .+", ["\n", "é🙂"], [""]),
        ("root ::= [a&&b]+ [[a]", ["&ba["], ["a", "b~"]),
        (r"root ::= [a-] [\-a] [-a] [^^\]]", ["-a-x"], ["b--x", "---^", "---]"]),
        ('root ::= "\ta\nb" [\t]', ["\ta\nb\t"], []),
        ("root ::= start # why not\nstart ::= | my-Rule_2\nmy-Rule_2 ::=\n  [ab]\n  | \"c\"", ["", "a", "c"], ["ab"]),
        ('root ::= root "a" | "b"', ["baa"], ["a", "ab"]),
        ("root ::= " + "(" * 500 + '"a" "b"?' + ")" * 500 + ' | "c" root', ["a", "cab"], ["b"]),
        (DOUBLED, ["cac"], ["ca"]),
        ('?start: A "x" // GBNF?\nA: "a"', ["ax"], ["a"]),
        (JSON, ['{"a": [1.5e3,{"é\\n": null}], "b":""}'], ["[1]", "{a:1}", '{"a":01}']),
        (SUMS, ["x=3\n", "x =3\n\n1+(a -b_2)*c= 7\n"], ["x=3", "=3\n", "1x=3\n"]),
        (PROGRAM, ["return 1;", "returned =f(1, g());if(a){in=b;}", "return=returnx;returnx;"], ["re", "return = ;"]),
        (CHESS, ["1. e4 e5\n2. Nf3 Nc6\n", "1. e4 d5\n2. exd5 Qxd5+\n13. O-O-O b8=Q#\n"], ["1. e4 e5\n", "2. e4 e5\n"]),
    ],
)  # fmt: skip
def test_texts(grammar, texts, others):
    matcher = matcher_of(grammar)
    assert [text for text in texts + others if accepts(matcher, text)] == texts


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= "a"\nb ::= ("c"', r"line 2: found a \( without its \)"),
        ('root ::= "a")', r"line 1: found a \) without its \("),
        ("root ::= * ", r"line 1: there is nothing before \* to repeat"),
        ('root ::= "a"\n{3,1}', r"line 2: \{3,1\} ends before it begins"),
        ("root ::= [z-a]", "line 1: z-a ends before it begins"),
        ("root ::= []", r"line 1: \[\] has no characters"),
        (r"root ::= [\d]", r"line 1: \\d is no character"),
        (r'root ::= "\ud800"', r"line 1: \\ud800 is no character"),
        ('root ::= "a" nope', "line 1: there is no rule 'nope'"),
        ('a ::= "b"', "there is no rule root"),
        ('"a"', "line 1: a rule begins with its name and ::=, found"),
        ('root ::= "a"\n\n; "b"', """line 3: this cannot be read: '; "b"'"""),
        ("root ::= <think>", "line 1: this cannot be read: '<think>'"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "it has 5002 rules and groups in brackets, and 2000 are taken"),
    ],
)
def test_what_is_no_gbnf(grammar, text):
    with pytest.raises(ValueError, match=text):
        answer("convert", grammar, LIMITS)


def random_part(rng: random.Random, names: list[str], depth: int) -> tuple[str, tuple]:
    """In GBNF, and as a tree of (kind, ...)."""
    kind = rng.choice(["text", "class", "name"] + ["repeat", "sequence", "choice"] * (depth > 0))
    if kind == "text" or (kind == "name" and not names):
        text = "".join(rng.choices(CHARACTERS, k=rng.randint(1, 3)))
        return f'"{text}"', ("sequence", *(("class", each) for each in text))
    if kind == "class":
        some = "".join(rng.sample(CHARACTERS, 2))
        return rng.choice([(f"[{some}]", ("class", some)), (f"[^{some}]", ("class", *(set(CHARACTERS) - set(some))))])
    if kind == "name":
        name = rng.choice(names)
        return name, ("name", name)
    if kind == "repeat":
        written, tree = random_part(rng, names, depth - 1)
        times, least, most = rng.choice([("*", 0, 9), ("+", 1, 9), ("?", 0, 1), ("{1,2}", 1, 2), ("{2,}", 2, 9)])
        return f"({written}){times}", ("repeat", tree, least, most)
    parts = [random_part(rng, names, depth - 1) for _ in range(rng.randint(1, 3))]
    sign = " " if kind == "sequence" else " | "
    return f"({sign.join(written for written, _ in parts)})", (kind, *(tree for _, tree in parts))


def pattern_of(tree: tuple) -> str:
    kind, *parts = tree
    if kind == "class":
        return f"[{''.join(parts)}]"
    if kind == "repeat":
        return f"(?:{pattern_of(parts[0])}){{{parts[1]},{parts[2]}}}"
    return f"(?:{('' if kind == 'sequence' else '|').join(map(pattern_of, parts))})"


def fits(trees: dict[str, tuple], text: str) -> bool:
    """Does the whole text fit root? Every rule at every place, until no new end is found."""
    known: dict[tuple[str, int], set[int]] = defaultdict(set)

    def ends(tree: tuple, start: int) -> set[int]:
        kind, *parts = tree
        if kind == "class":
            return {start + 1} if start < len(text) and text[start] in "".join(parts) else set()
        if kind == "name":
            return set(known[parts[0], start])
        if kind == "choice":
            return set().union(*(ends(part, start) for part in parts))
        steps = [parts[0]] * parts[2] if kind == "repeat" else parts
        here, found = {start}, set()
        for num, step in enumerate(steps):
            found |= here if kind == "repeat" and num >= parts[1] else set()
            here = set().union(*(ends(step, each) for each in here))
        return found | here

    size = -1
    while size != (size := sum(map(len, known.values()))):
        for name, tree in trees.items():
            for start in range(len(text) + 1):
                known[name, start] |= ends(tree, start)
    return len(text) in known["root", 0]


def test_random_regular_grammars():
    rng, num_fitting = random.Random(1), 0
    for _ in range(150):
        (first, first_tree), (second, second_tree), (whole, tree) = (random_part(rng, [], 2) for _ in range(3))
        matcher = matcher_of(f"root ::= a b | {whole}\na ::= {first}\nb ::= {second}")
        pattern = re.compile(pattern_of(("choice", ("sequence", first_tree, second_tree), tree)))
        for _ in range(20):
            text = "".join(rng.choices(CHARACTERS, k=rng.randint(0, 6)))
            expected = pattern.fullmatch(text) is not None
            assert accepts(matcher, text) == expected, (first, second, whole, text)
            num_fitting += expected
    assert num_fitting > 100


def test_random_recursive_grammars():
    rng, num_fitting = random.Random(2), 0
    for _ in range(60):
        parts = {name: random_part(rng, ["root", "p", "q"], 3) for name in ("root", "p", "q")}
        grammar = "\n".join(f"{name} ::= {written} | [abc]" for name, (written, _) in parts.items())
        matcher = matcher_of(grammar)
        trees = {name: ("choice", tree, ("class", "abc")) for name, (_, tree) in parts.items()}
        for _ in range(12):
            text = "".join(rng.choices(CHARACTERS, k=rng.randint(0, 6)))
            expected = fits(trees, text)
            assert accepts(matcher, text) == expected, (grammar, text)
            num_fitting += expected
    assert num_fitting > 60
