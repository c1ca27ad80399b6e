"""`nanovllm chat` as its user sees it, most of it in a real terminal."""

import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from select import select
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.tools import cli
from nanovllm.tools.terminal import WordWrap
from tests.checkpoints import SMALL
from tests.processes import LIMIT_S

CONTROLS = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|[\x07\x08]")
LEFT, UP, BACKSPACE, HOME, END = "\x1b[D", "\x1b[A", "\x7f", "\x01", "\x05"


class Terminal:
    """A chat in a terminal: what a person types, and what stands on the screen."""

    def __init__(self, processes, model, *arguments: str, columns: int = 80) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        command = ["-m", "nanovllm", "chat", "--model", str(model), "--temperature", "0", *arguments]
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process: subprocess.Popen = processes.start(
            *command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm-256color"}
        )
        os.close(theirs)
        self._read_bytes, self._seen = b"", 0

    @property
    def raw(self) -> str:
        return self._read_bytes.decode(errors="replace")

    @property
    def screen(self) -> str:
        """Without what moves the cursor, sets colours or rings."""
        return CONTROLS.sub("", self.raw).replace("\r\n", "\n")

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read_until(self, end: str) -> str:
        """What is new on the screen, up to this and with it."""
        while end not in self.screen[self._seen :]:
            self._read()
        start, self._seen = self._seen, self.screen.index(end, self._seen) + len(end)
        return self.screen[start : self._seen]

    def read_some_of_an_answer(self) -> None:
        """After a question: at least one character of its answer."""
        while "\n" not in self.screen[self._seen :].rstrip("\n"):
            self._read()

    def _read(self) -> None:
        assert select([self._ours], [], [], LIMIT_S)[0], f"nothing comes after {self.screen!r}"
        self._read_bytes += os.read(self._ours, 4096)

    def ask(self, line: str) -> str:
        """The answer to this line, which may hold keys that edit it. It ends where the next prompt begins."""
        self.type(f"{line}\r")
        return self.read_until("\nyou > ").split("\n", 1)[1]

    def leave(self) -> str:
        self.type("/quit\r")
        with suppress(OSError):  # the other end is gone
            while chunk := os.read(self._ours, 4096):
                self._read_bytes += chunk
        assert self.process.wait(LIMIT_S) == 0
        return self.screen


@pytest.fixture
def open_chat(processes, checkpoint):
    def get(*arguments: str, **more: Any) -> Terminal:
        chat = Terminal(processes, checkpoint(), *arguments, **more)
        chat.read_until("\nyou > ")
        return chat

    return get


def expected_answer(llm: LLM, question: str, max_tokens: int, system: str | None = None) -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    beginning = [{"role": "system", "content": system}] if system else []
    [output] = llm.chat([*beginning, {"role": "user", "content": question}], params, use_tqdm=False)
    return CONTROLS.sub("", output.outputs[0].text)


def text_of(answer: str) -> str:
    """Without what its cost says."""
    return re.sub(r"\d+ prompt tokens, .*", "", answer, flags=re.DOTALL).rstrip()


def test_a_conversation(open_chat, llm):
    """Lines that are edited and recalled, a command that is not known, new conversations, answers that are cut. All in
    one process: its imports take longer than everything else."""
    system = "Be brief."
    chat = open_chat("--system", system, "--max-tokens", "200", "--max-model-len", "512", columns=100)

    # The prompt takes as much room as it looks. Its colour codes are no characters: at the beginning of a line that
    # fits, the cursor is in the same row.
    line = "gulls" * 18  # with the prompt, 96 of 100 columns
    chat.type(f"{line}{HOME}a")
    chat.read_until(f"a{line}")
    assert "\x1b[1;32m" in chat.raw and UP not in chat.raw
    chat.ask("")

    # The engine gets a line as it was when Enter came.
    for command in ("/what", "/reset"):
        chat.ask(command)
    expected = expected_answer(llm, "two red gulls", 200, system).split()
    assert text_of(chat.ask(f"red gulsl{LEFT}{BACKSPACE}{HOME}two {END}{BACKSPACE}ls")).split() == expected
    chat.ask("/reset")
    assert text_of(chat.ask(UP + UP)).split() == expected, "the line before /reset comes back"
    assert chat.screen.count("/reset starts over") == 2, "at the beginning and for what is not known"
    found = re.findall(r"(\d+) prompt tokens, (\d+) of them cached", chat.screen)
    assert len(found) == 3 and int(found[0][1]) == 0
    assert 0 < int(found[1][1]) < 32, "of the second conversation the system message alone was known"

    # Typing waits until the answer has ended: it is not shown in the middle of it, and is not lost.
    chat.ask("/reset")
    chat.type("a gull\r")
    chat.read_some_of_an_answer()
    chat.type("two gulls")
    answer = chat.read_until("\nyou > ").split("\n", 1)[1]
    assert text_of(answer).split() == expected_answer(llm, "a gull", 200, system).split()
    assert chat.read_until("two gulls") == "two gulls"

    # Ctrl-C cuts an answer, and typing is seen again.
    chat.type("\r")
    chat.read_some_of_an_answer()
    chat.process.send_signal(signal.SIGINT)
    chat.read_until("\nyou > ")
    chat.type("a red boat")
    assert chat.read_until("a red boat") == "a red boat"
    chat.ask("")
    chat.leave()


def test_a_python_without_readline(checkpoint, llm, capsys, monkeypatch):
    """Its terminal has no keys to edit a line with, and nobody who takes the prompt's marks away."""
    ours, theirs = pty.openpty()
    os.write(ours, b"two gulls\r/quit\r")
    monkeypatch.setitem(sys.modules, "readline", None)
    monkeypatch.setenv("COLUMNS", "200")
    with open(ours, "rb"), open(theirs) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        given = ["--temperature", "0", "--max-tokens", "12", "--max-model-len", "256"]
        assert cli.main(["chat", "--model", str(checkpoint()), *given]) == 0
    shown = capsys.readouterr().out
    assert "\x01" not in shown
    assert CONTROLS.sub("", shown).split("you > ")[1].strip() == expected_answer(llm, "two gulls", 12)


@pytest.mark.nightly
def test_answers_wrap_at_words(processes, demo_checkpoint):
    """And the demo model, without its own sampling, knows a capital."""
    question = "What is the capital of France, and what is it known for?"
    chat = Terminal(processes, demo_checkpoint, "--max-tokens", "60", "--max-model-len", "256", columns=24)
    chat.read_until("\nyou > ")
    chat.type(f"{question}\r")
    answer = text_of(chat.read_until("\nyou > ").partition("for?")[2])
    lines = answer.strip("\n").splitlines()
    assert "The capital of France is Paris" in " ".join(lines)
    assert len(lines) > 5 and all(len(line) <= 24 for line in lines)
    chat.leave()


@pytest.mark.parametrize("cut", [1, 3, 1000])
@pytest.mark.parametrize(
    ("columns", "text", "lines"),
    [
        (9, "one two three four", ["one two", "three", "four"]),
        (7, "one two three", ["one two", "three"]),  # the first line is full
        (12, "a  b\n    indented\n\nend", ["a  b", "    indented", "", "end"]),
        (9, "x incomprehensibilities y", ["x", "incomprehensibilities y"]),  # the terminal cuts it; y fits after it
        (8, "猫は魚を食べる", ["猫は魚を", "食べる"]),
        (8, "ein Tier: 猫は魚", ["ein", "Tier: 猫", "は魚"]),
    ],
)
def test_words_that_do_not_fit(capsys, monkeypatch, columns, text, lines, cut):
    """However the text arrives."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = WordWrap()
    for at in range(0, len(text), cut):
        shown.write(text[at : at + cut])
    shown.write("\n")
    assert capsys.readouterr().out.split("\n") == [*lines, ""]


def test_the_demo_model_answers_greedily(demo_stand_in, tmp_path, capsys, monkeypatch):
    """By name, by path and by default; a copy of it is any model, and so is the demo model with --temperature."""
    monkeypatch.setenv("COLUMNS", "200")
    copied = shutil.copytree(demo_stand_in, tmp_path / "copy")
    llm = LLM(str(demo_stand_in), **SMALL)
    assert llm.get_default_sampling_params().temperature == 2.0
    expected = expected_answer(llm, "two gulls", 12)

    def answered(*arguments: str) -> str:
        lines = iter(["two gulls", "/quit"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
        given = ["chat", "--max-tokens", "12", "--max-model-len", "256", *arguments]
        assert cli.main(given) == 0
        return capsys.readouterr().out.split("\n", 1)[1].strip()

    for arguments in ((), ("--model", "demo"), ("--model", str(demo_stand_in))):
        assert answered(*arguments) == expected
    assert answered("--model", str(copied)) != expected
    assert answered("--temperature", "2") != expected
