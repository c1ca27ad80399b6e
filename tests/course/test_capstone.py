"""The capstone: our policy beats the engine by itself, cheats are refused, broken engines fail."""

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from chapters.__main__ import main
from chapters.capstone import battery, case, judge, policy, reference, repair, scale, simple
from chapters.capstone.answers import Refused
from chapters.capstone.desk import Desk
from chapters.capstone.faults import CASES, FAULTS
from chapters.capstone.real import SIZES, RealServer
from chapters.capstone.repair import FILES
from chapters.capstone.score import check_conservation, timings
from chapters.capstone.simulation import Served, setup_for, simulate
from chapters.capstone.trace import Row, draw_trace, read_trace, write_trace
from chapters.capstone.views import Setup
from chapters.expect import Wrong
from nanovllm.worker import sampler
from tests.marks import by_night

ROOT = Path(__file__).parents[2]
SETUP = setup_for()
SHORT = draw_trace(1, seconds=1.5)
POLICY = Path(policy.__file__).read_text("utf-8")

REFUSED = {  # method, body -> what is said
    "raises": ("refuse", "return 1 / 0", "ZeroDivisionError: division by zero\nraises.py, line"),
    "ends": ("order", "import os; os._exit(0)", "the program was ended with exit code 0 before it was done"),
    "exits": ("order", "raise SystemExit(0)", "your policy led to SystemExit: 0"),
    "hangs": ("order", "while True: pass", "it was not done after 0.7 s"),
    "writes": (
        "order",
        "import os; [os.write(fd, b'x\\n') for fd in range(3, 20) if os.path.exists(f'/proc/self/fd/{fd}')]",
        "something was written into the grader's own pipe",
    ),
    "unknown": ("order", "return [10**9]", "order() names request 1000000000"),
    "twice": ("order", "return [r.id for r in given[0].waiting] * 2", "order() names request 0 twice"),
    "no_list": ("refuse", "return 'all of them'", "refuse() returns a list of ids"),
    "starves": ("order", "return []", "nobody will come, and order() lets"),
    "nan": ("worth", "return float('nan')", "worth() is a finite number, found [nan"),
    "negative": ("token_budget", "return -1", "token_budget() is a whole number from 1 to 2,048, found -1"),
    "huge": ("token_budget", "return 10**9", "found 1000000000"),
    "draft tokens": (
        "num_draft_tokens",
        "return {r.id: 9**9 for r in given[0].running if r.first_token_s}",
        "0 to 8 draft tokens",
    ),
    "no_dictionary": ("num_draft_tokens", "return None", "num_draft_tokens() returns a dictionary, found None"),
    "a number": ("refuse", "return 5", "refuse() returns a list of ids, found 5"),
    "numpy": (
        "order",
        "import numpy; return [numpy.int64(r.id) for r in given[0].waiting]",
        "order(): found 0 of type int64: return Python's int",
    ),
    "others": ("num_draft_tokens", "return {77: 1}", "num_draft_tokens() names request 77, which does not run"),
}
SENDS_NO_SCORE = """
import sys
frame = sys._getframe()
while "send" not in frame.f_locals:
    frame = frame.f_back
frame.f_locals["send"](result=[["x"] * 8, ""])
"""
SENDS_A_PROBLEM = SENDS_NO_SCORE.replace('[["x"] * 8, ""]', r'[None, "\x1b[2J"]')
WRONG_REPAIRS = [
    (1, "lora_id is not None", "cache_salt is not None"),
    (2, "            block.ref_count -= 1\n", "            block.ref_count = max(block.ref_count - 1, 0)\n"),
    (3, "budget <= 1", "budget < 0"),
    (4, "if seq in self.running:\n                self.block_manager.free(seq)\n", "seq.block_table = []\n"),
]


def with_method(method: str, body: str) -> str:
    return f"{POLICY}\n\nclass Policy(Policy):\n    def {method}(self, *given):\n        {body}\n"


def served(trace: list[Row], policy_class: type, hybrid: bool = False) -> Served:
    """In this process: the policy is ours."""
    found = simulate(trace, SETUP, Desk(policy_class, list(SETUP)), hybrid)
    check_conservation(found)
    return found


@pytest.mark.parametrize("seed", [8_461, by_night(52_907)])
def test_our_policy_beats_the_engine_by_itself(seed):
    trace = draw_trace(seed, seconds=8.0)
    baseline, ours = judge.judge(None, trace, SETUP).score, judge.scored(served(trace, reference.Policy), SETUP)
    assert baseline is not None and ours.goodput > 1.4 * baseline.goodput


@pytest.mark.nightly
def test_simple_rules_leave_room():
    """The README has the figures of eight traces."""
    trace = draw_trace(104)
    baseline, ours = scale.goodput_of(None, trace), scale.goodput_of(reference.Policy, trace)
    assert baseline < ours < scale.upper_bound(trace)
    for policy_class, least, most in (
        (simple.RefuseHopeless, 0, 20),
        (simple.Combined, 30, 70),
        (simple.CombinedWithDrafts, 30, 70),
        (simple.AnswerLengths, 50, 85),
        (simple.LengthsAndSlack, 70, 100),
    ):
        goodput = scale.goodput_of(policy_class, trace)
        assert least <= judge.percent_of(goodput, baseline, ours) <= most


def test_the_upper_bound_is_by_hand():
    """1,000 tokens of its own take 0.1 s: ten seconds hold a hundred such requests. What is shared costs nothing."""
    rows = [Row(f"{i}", i / 10, 5900, 101, "shared", 5000) for i in range(101)] + [Row("x", 10.0, 9000, 9000, "", 0)]
    assert scale.upper_bound(rows) == pytest.approx(10.0)


def test_the_scale_goes_on_beyond_our_policy():
    """No percentage if our policy is no better than the engine by itself, as it may be on a trace of one's own."""
    found = judge.scored(served(SHORT, policy.Policy), SETUP)
    baseline = judge.Verdict(judge.BASELINE, found._replace(goodput=1.0))
    others = [judge.Verdict("ada", found._replace(goodput=6.0)), judge.Verdict("bob", None, "it imports gc")]
    others += [judge.Verdict(name, found._replace(goodput=3.0)) for name in (judge.BASELINE, "our policy")]  # files
    ours = judge.Verdict("our policy", found._replace(goodput=5.0))
    table = judge.table_of([*others, baseline, ours], baseline, ours)
    assert [*table.columns[-1].cells] == ["125 %", "-25 %", "50 %", "50 %", "0 %", "100 %"]
    worse = judge.Verdict("our policy", found._replace(goodput=0.5))
    assert judge.table_of([*others, baseline, worse], baseline, worse).columns[-1].header == "hits"


@pytest.mark.parametrize("hybrid", [False, True])
def test_as_it_stands_the_policy_is_the_engine(hybrid):
    trace = draw_trace(3, seconds=6.0)
    engine, same = simulate(trace, SETUP, hybrid=hybrid), served(trace, policy.Policy, hybrid)
    assert [client.token_times for client in engine.clients] == [client.token_times for client in same.clients]
    assert engine.hit_rate == same.hit_rate > 0


def test_snapshots_are_the_policys():
    class NoSnapshots(policy.Policy):
        def snapshots(self, num_tokens, num_matched):
            return {}

    assert served(draw_trace(3, seconds=6.0), NoSnapshots, hybrid=True).hit_rate == 0


def test_another_process_decides_the_same(tmp_path):
    trace = draw_trace(5, seconds=3.0)
    found = judge.judge(Path(reference.__file__), trace, SETUP)
    assert found.score == judge.scored(served(trace, reference.Policy), SETUP) and not found.problem


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, tmp_path):
    method, body, said = REFUSED[name]
    file = tmp_path / f"{name}.py"
    file.write_text(with_method(method, body), "utf-8")
    verdict = judge.judge(file, SHORT, SETUP, 0.7 if name == "hangs" else 20.0)
    assert verdict.score is None and said in verdict.problem


def test_what_is_no_policy(tmp_path):
    file = tmp_path / "ada.py"
    for source, said in (("x = 1", "ada.py has no class Policy"), ("def (", "cannot be loaded: SyntaxError")):
        file.write_text(source, "utf-8")
        assert said in judge.judge(file, SHORT, SETUP).problem
    assert "cannot be read: No such file" in judge.judge(tmp_path / "nowhere.py", SHORT, SETUP).problem
    file.write_text(SENDS_A_PROBLEM, "utf-8")
    assert judge.judge(file, SHORT, SETUP).problem == "\\x1b[2J"


def test_traces_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "trace.csv"
    write_trace(SHORT, file)
    assert read_trace(file) == [row._replace(arrival_s=round(row.arrival_s, 3)) for row in SHORT]
    lines = file.read_text("utf-8").splitlines()
    for wrong, said in (
        ("no,columns", "no column arrival_s"),
        (f"{lines[0]}\n0,nan,5,5,,0", "line 2: arrival_s is a number"),
        (f"{lines[0]}\n0,1.5,5,0,,0", "line 2: a prompt and an answer have"),
        (f"{lines[0]}\n0,1.5,5,5,a,6", "line 2: prefix_tokens are some"),
        (f"{lines[0]}\n0,1.5,5,5,,4", "line 2: prefix_tokens are those of a prefix_id"),
        (lines[0], "has 0"),
    ):
        file.write_text(wrong, "utf-8")
        with pytest.raises(ValueError, match=said):
            read_trace(file)


def test_a_class_and_its_board(tmp_path, capsys):
    folder, board, trace = tmp_path / "class", tmp_path / "board.jsonl", tmp_path / "trace.csv"
    write_trace(SHORT, trace)
    folder.mkdir()
    (folder / "ada.py").write_text(POLICY, "utf-8")
    attributes = "import gc, numpy\n        lambda: numpy" + ".os" * 400  # none of ours reads it by recursion
    (folder / "bob.py").write_text(with_method("order", f"{attributes}\n        return 5"), "utf-8")
    board.write_text('{"name": 5}\nnonsense\n', "utf-8")
    options = ["--trace", str(trace), "--board", str(board)]
    assert main(["capstone", "score", str(folder), *options]) == 1
    told = capsys.readouterr().out
    assert "bob is refused: order() returns a list of ids, found 5" in told
    assert "bob: look at it: imports gc" in told and "ada: look" not in told
    served = json.loads(board.read_text("utf-8").splitlines()[-1])["served"]
    names = [entry["name"] for entry in judge.read_board(board, "trace.csv, 2G", served)]
    assert names == ["ada", "bob"] and main(["capstone", "board", *options]) == 0
    assert main(["capstone", "board", *options, "--memory", "2048M"]) == 0, "the same memory"
    assert main(["capstone", "board", *options, "--memory", "1G"]) == 1
    renamed = ["--trace", str(trace.rename(tmp_path / "same.csv")), "--board", str(board)]
    assert main(["capstone", "board", *renamed]) == 0, "the same trace by another name"
    write_trace(SHORT[1:], trace)
    assert main(["capstone", "board", *options]) == 1, "another trace of the same name"


@pytest.mark.parametrize("unused", [["--name", "ada"], ["--memory", "1G"], ["--hybrid"], ["--board", "board.jsonl"]])
def test_what_real_time_does_not_take(unused, capsys):
    assert main(["capstone", "run", "--real", *unused]) == 2
    assert f"--real takes no {unused[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["run", "--board", "board.jsonl"], "--board needs --name"),
        (["broken", "3", "--case", "case.txt"], "--case needs --check"),
    ],
)
def test_options_that_would_say_nothing(options, said, capsys):
    assert main(["capstone", *options]) == 2 and said in capsys.readouterr().err


def test_a_request_that_is_too_long_for_real_time(tmp_path, capsys):
    """It is named before a model is loaded."""
    write_trace([*SHORT[:1], Row("long", 0.5, 24_000, 600, "", 0)], tmp_path / "trace.csv")
    assert main(["capstone", "run", "--real", "--trace", str(tmp_path / "trace.csv")]) == 2
    told = capsys.readouterr().err
    assert "up to 24,576 tokens; request long has 24,000 + 600" in told and "engine" not in told


@pytest.mark.parametrize("spoiled", [{"goodput": "x"}, {"goodput": float("nan")}, {"num_good": 99}, {"num_late": 0.0}])
def test_what_can_be_no_score(spoiled):
    sound = judge.scored(served(SHORT, policy.Policy), SETUP)
    assert judge.score_of([*sound], len(SHORT)) == sound
    with pytest.raises((TypeError, ValueError)):
        judge.score_of([*sound._replace(**spoiled)], len(SHORT))


def test_a_class_is_shown_even_if_there_is_no_board(tmp_path, capsys):
    """A policy that sends what is no score is refused like any other."""
    write_trace(SHORT, tmp_path / "trace.csv")
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "ada.py").write_text(POLICY, "utf-8")
    (tmp_path / "class" / "bob.py").write_text(SENDS_NO_SCORE, "utf-8")
    (tmp_path / "file").touch()
    options = ["--trace", str(tmp_path / "trace.csv"), "--board", str(tmp_path / "file" / "board.jsonl")]
    assert main(["capstone", "score", str(tmp_path / "class"), *options]) == 2
    told = capsys.readouterr()
    assert "bob is refused: something was written into the grader's own pipe" in told.out
    assert "ada" in told.out and "file" in told.err


@pytest.mark.parametrize("limit", ["-1", "nan", "inf"])
def test_a_limit_that_is_none(limit, capsys):
    with pytest.raises(SystemExit):
        main(["capstone", "run", "--limit", limit])
    assert "is not a number of seconds" in capsys.readouterr().err


def test_timings_are_the_load_generators():
    [timing] = timings(simulate([Row("0", 2.0, 100, 5, "", 0)], SETUP))
    assert (timing.ttft_s, timing.tpot_s) == (pytest.approx(0.012 + 0.01), pytest.approx(0.0121))
    assert astuple(timing)[-2:] == (5, None)


def test_the_real_engine_has_the_same_seams(checkpoint):
    """Every answer is the one that the engine gives by itself, whatever the policy decides."""
    server = RealServer(str(checkpoint()), max_model_len=128)
    rows = [Row(f"{i}", 0.0, 16 * (20 + 5 * i), 16 * 12, "shared", 16 * 16) for i in range(8)]
    due = server.requests(rows)
    setup = Setup(*SIZES, 0.01, 0.0001, 60.0, 60.0)
    tokens = []
    for asked in (None, Desk(reference.Policy, list(setup))):
        found = server.serve(due, setup, asked)
        assert judge.scored(found, setup).num_good == 8
        tokens.append([client.seq.tokens for client in found.clients])
    assert tokens[0] == tokens[1]
    drafting = type("Drafting", (policy.Policy,), {"num_draft_tokens": lambda self, state: draft_for_all(state)})
    found = server.serve(due, setup, Desk(drafting, list(setup)))
    assert [client.seq.tokens for client in found.clients] == tokens[0]
    with pytest.raises(Refused, match="lets the others wait"):
        server.serve(due, setup, Desk(type("Nobody", (policy.Policy,), {"order": lambda self, state: []}), list(setup)))
    server.stop()


def draft_for_all(state):
    return {request.id: 4 for request in state.running if request.first_token_s is not None}


# -- broken engines -----------------------------------------------------------------------------------------------


def problems(results: list[repair.Checked]) -> list[str]:
    return [problem for _, problem in results if problem]


def test_a_sound_engine_passes():
    for check in battery.CORE:
        check()
    assert not problems(repair.grade(1, (ROOT / "nanovllm" / FILES[1]).read_text("utf-8")))


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_broken_engine_fails(number):
    assert problems(repair.grade(number, repair.broken_source(number)))


@pytest.mark.parametrize("number, old, new", WRONG_REPAIRS)
def test_a_wrong_repair_fails(number, old, new):
    source = repair.broken_source(number)
    assert source.count(old) == 1 and problems(repair.grade(number, source.replace(old, new)))


@pytest.mark.parametrize("number", [number if number < 3 else by_night(number) for number in FILES])
def test_a_case_shows_its_fault_and_no_other(number, tmp_path, capsys):
    assert not problems(repair.grade_case(number, CASES[number]))
    nothing = "probs 0.6 0.4 top_p 1.0\n" if number == 5 else "send a 1: 1 2\nrun\n"
    assert problems(repair.grade_case(number, nothing)) == ["the sound engine and the broken one show the same"]
    long = CASES[number] + "# a remark\n" + (nothing if number == 5 else "step\n") * 9
    assert any("lines are enough" in problem for problem in problems(repair.grade_case(number, long)))


def test_a_case_that_shows_another_fault(tmp_path):
    """Tenants and adapters at once; and what is no case."""
    both = CASES[1] + "send c 1: 1 2 3 4 5\nrun\nsend d 1 lora=1: 1 2 3 4 5\nrun\n"
    assert any("which of the two" in problem for problem in problems(repair.grade_case(1, both)))
    [problem] = problems(repair.grade_case(4, "jump"))
    assert "cannot read: jump" in problem
    long = "send a 1: " + "1 " * 201
    for wrong in (
        "probs 0.6 0.4 top_k",
        long,
        "send a: 1",
        "send a 1 colour=red: 1",
        "leave a",
        "step many",
        "blocks 0",
    ):
        with pytest.raises(ValueError, match=r"cannot read|whole number|at most 200 tokens, found 201"):
            case.see(case.read_case(wrong))


@pytest.mark.parametrize("source", ["import os; os._exit(0)", "raise SystemExit(0)"])
def test_a_file_that_ends_the_check_repairs_nothing(source, tmp_path, capsys):
    file, case = tmp_path / "1_sequence.py", tmp_path / "case.txt"
    file.write_text(source, "utf-8")
    case.write_text(CASES[1], "utf-8")
    assert main(["capstone", "broken", "1", "--check", str(file), "--case", str(case)]) == 1
    assert "come to their end" in capsys.readouterr().out


def test_files_of_windows(tmp_path, capsys):
    """A mark at the beginning of a file is left out; another encoding is an error that names the file."""
    file, case = tmp_path / "2_block_manager.py", tmp_path / "case.txt"
    file.write_text(repair.sound_source(2), "utf-8")
    case.write_text(CASES[2], "utf-16")
    command = ["capstone", "broken", "2", "--check", str(file), "--case", str(case)]
    assert main(command) == 2 and "case.txt is not UTF-8 text" in capsys.readouterr().err
    case.write_text(CASES[2], "utf-8-sig")
    assert main(command) == 0


def test_a_copy_of_the_engines_file_is_not_enough(capsys):
    file = ROOT / "nanovllm" / FILES[3]
    assert main(["capstone", "broken", "3", "--check", str(file)]) == 1
    assert "a repair can be copied" in capsys.readouterr().out


@pytest.mark.parametrize("repair_tried", ["", " | (values == values[:, :1])"])
def test_the_broken_sampler_fails(repair_tried, monkeypatch):
    """In this process, which has PyTorch already. The repair keeps the first token, and drops what crosses top_p."""
    fault = FAULTS[5].new + "[:, None]"
    source = repair.broken_source(5)
    found: dict[str, Any] = {}
    exec(source.replace(fault, f"({fault}){repair_tried}"), found)
    for check in battery.BATTERIES[5]:
        check()
    monkeypatch.setattr(sampler, "logit_threshold", found["logit_threshold"])
    with pytest.raises(Wrong, match="what is left"):
        for check in battery.BATTERIES[5]:
            check()


def test_what_users_see(tmp_path, capsys):
    assert main(["capstone", "broken", "4"]) == 0
    told = capsys.readouterr().out
    assert "6 of 64 blocks" in told and "--check FILE --case FILE" in told
    assert main(["capstone", "broken", "4", "--out", str(tmp_path)]) == 0
    [file] = tmp_path.iterdir()
    assert file.read_text("utf-8") == repair.broken_source(4) and main(["capstone", "broken", "6"]) == 2


def test_a_students_edition_has_broken_files_ready(tmp_path, monkeypatch):
    monkeypatch.setattr(repair, "READY", tmp_path)
    (tmp_path / "2.py").write_text("here", "utf-8")
    assert repair.broken_source(2) == "here"
    assert FILES.keys() == FAULTS.keys()
