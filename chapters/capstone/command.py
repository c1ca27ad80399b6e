"""python -m chapters capstone: run and score policies, show and grade broken engines (README.md)."""

import argparse
import hashlib
import secrets
from pathlib import Path

from rich.console import Console

from chapters.capstone.judge import LIMIT_S, Verdict, board_table, default_board, judge, post, read_board, table_of
from chapters.capstone.simulation import BLOCK_BYTES, setup_for
from chapters.capstone.trace import Row, draw_trace, read_trace, write_trace
from chapters.capstone.views import Setup
from chapters.submission import readable
from nanovllm.checks.values import size_of

POLICY = Path(__file__).with_name("policy.py")
REFERENCE = Path(__file__).with_name("reference.py")
SCALE = Path(__file__).with_name("scale.py")  # a student's edition has neither
OURS = "our policy"
PUBLIC_SEED = 1
MEMORY = "2G"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    run = actions.add_parser("run", help="serve a trace with a policy", description="Serve a trace with a policy.")
    run.add_argument("--policy", type=Path, default=POLICY, metavar="FILE", help="your policy (default: policy.py)")
    add_trace(run, f"draw the trace from this number (default: {PUBLIC_SEED})")
    run.add_argument("--real", action="store_true", help="the demo model serves the first requests, in real time")
    run.add_argument("--name", help="put the result on the board under this name")
    add_common(run)

    score = actions.add_parser("score", help="judge a class", description="Judge all policies of a folder.")
    score.add_argument("folder", type=Path, help="a folder with a .py file of each student")
    add_trace(score, "draw the trace from this number (default: one that nobody knows, printed at the end)")
    add_common(score)

    board = actions.add_parser("board", help="show the board", description="Show the board of a trace.")
    add_trace(board, f"the trace drawn from this number (default: {PUBLIC_SEED})")
    add_memory(board)

    trace = actions.add_parser("trace", help="write a trace as CSV", description="Write a drawn trace as CSV.")
    trace.add_argument(
        "--seed", type=int, default=PUBLIC_SEED, help=f"draw it from this number (default: {PUBLIC_SEED})"
    )
    trace.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")

    if SCALE.exists():
        about = "for teachers: how far simple rules get, and our policy without one of its methods"
        scale = actions.add_parser("scale", help=about, description="How far simple rules get.")
        scale.add_argument("--seeds", type=int, default=8, metavar="N", help="traces (default: 8)")
        scale.add_argument("--hybrid", action="store_true", help="what the placing of snapshots is worth")

    broken = actions.add_parser("broken", help="engines to repair", description="Five broken engines to repair.")
    broken.add_argument("number", type=int, help="which one, 1 to 5")
    what = broken.add_mutually_exclusive_group()
    what.add_argument("--out", type=Path, metavar="FOLDER", help="write its broken file into this folder")
    what.add_argument("--check", type=Path, metavar="FILE", help="grade your repaired file, with --case")
    about = "with --check: the shortest session that shows the fault (chapters/capstone/case.py says how it is written)"
    broken.add_argument("--case", type=Path, metavar="FILE", help=about)


def add_trace(parser: argparse.ArgumentParser, seed: str) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--trace", type=Path, metavar="FILE", help="a CSV file of requests")
    which.add_argument("--seed", type=int, help=seed)


def add_common(parser: argparse.ArgumentParser) -> None:
    from chapters.__main__ import seconds

    add_memory(parser)
    limit = f"of wall time for one run (default: {LIMIT_S:g})"
    parser.add_argument("--limit", type=seconds, default=LIMIT_S, metavar="SECONDS", help=limit)


def add_memory(parser: argparse.ArgumentParser) -> None:
    """What is served in, and the board of it."""
    parser.add_argument("--memory", default=MEMORY, metavar="BYTES", help=f"for keys and values (default: {MEMORY})")
    parser.add_argument("--hybrid", action="store_true", help="the model has states, and the policy places snapshots")
    parser.add_argument(
        "--board", type=Path, metavar="FILE", help="the board's file (default: one in your data folder)"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    actions = {
        "run": run_policy,
        "score": run_score,
        "board": run_board,
        "trace": run_trace,
        "scale": run_scale,
        "broken": run_broken,
    }
    return actions[args.action](args, console)


def run_policy(args: argparse.Namespace, console: Console) -> int:
    trace, label = chosen_trace(args, PUBLIC_SEED)
    if args.real:
        from chapters.__main__ import refuse_beside
        from chapters.capstone.real import serve_for_real

        unused = {
            "--name": args.name,
            "--board": args.board,
            "--hybrid": args.hybrid,
            "--memory": args.memory != MEMORY,
        }
        refuse_beside("--real", unused, "they are for simulated time")
        return serve_for_real(args.policy, trace, args.limit, console)
    if args.board and not args.name:
        raise ValueError("--board needs --name NAME, under which the result is put on it")
    setup = chosen_setup(args, trace)
    with console.status(f"serving {len(trace)} requests"):
        baseline = judge(None, trace, setup, hybrid=args.hybrid)
        own = judge(args.policy, trace, setup, args.limit, args.hybrid, args.name or "")
    show_setup(console, setup, label)
    show(console, [baseline, own])
    if args.name:
        board = args.board or default_board()
        served = digest_of(trace, setup, args.hybrid)
        post(board, own, label, served)
        console.print(board_table(read_board(board, label, served), f"The board of {label}"))
    return 0 if own.score is not None else 1


def run_score(args: argparse.Namespace, console: Console) -> int:
    seed = secrets.randbits(48) if args.seed is None else args.seed
    trace, label = chosen_trace(args, seed)
    setup, files = chosen_setup(args, trace), sorted(args.folder.glob("[!._]*.py"))
    if not files:
        raise ValueError(f"{args.folder} is no folder with .py files")
    baseline, own = judge(None, trace, setup, hybrid=args.hybrid), list[Verdict]()
    for file in files:
        with console.status(f"{readable(file.name, 40)}: serving {len(trace)} requests"):
            own.append(judge(file, trace, setup, args.limit, args.hybrid))
    ours = reference_verdict(trace, setup, args)
    show_setup(console, setup, label)
    verdicts = [baseline, *own, *([ours] if ours is not None else [])]
    verdicts.sort(key=lambda verdict: -verdict.score.goodput if verdict.score is not None else 0.0)
    show(console, verdicts, baseline, ours)
    if REFERENCE.exists():  # a student's edition has nothing of teachers'
        from chapters.teaching.suspicious import flags_beside

        for file in files:
            if flags := flags_beside(file.read_bytes(), POLICY.read_bytes()):
                said = f"{readable(file.stem, 40)}: look at it: {readable('; '.join(flags))}"
                console.print(said, markup=False, soft_wrap=True)
    for verdict in own:  # last, for the board's folder may refuse it
        post(args.board or default_board(), verdict, label, digest_of(trace, setup, args.hybrid))
    return 0 if all(verdict.score is not None for verdict in verdicts) else 1


def run_board(args: argparse.Namespace, console: Console) -> int:
    trace, label = chosen_trace(args, PUBLIC_SEED)
    served = digest_of(trace, chosen_setup(args, trace), args.hybrid)
    entries = read_board(args.board or default_board(), label, served)
    if not entries:
        console.print(f"Nobody has served {label} yet:  python -m chapters capstone run --name NAME", markup=False)
        return 1
    console.print(board_table(entries, f"The board of {label}"))
    return 0


def run_trace(args: argparse.Namespace, console: Console) -> int:
    rows = draw_trace(args.seed)
    write_trace(rows, args.out)
    console.print(f"{len(rows)} requests in {readable(args.out)}", markup=False)
    return 0


def run_scale(args: argparse.Namespace, console: Console) -> int:
    from chapters.capstone.scale import print_scale

    if args.seeds < 1:
        raise ValueError(f"--seeds is 1 or more, found {args.seeds}")
    return print_scale(args.seeds, args.hybrid, console)


def run_broken(args: argparse.Namespace, console: Console) -> int:
    from chapters.capstone.repair import check, complain, write

    if args.case and not args.check:
        raise ValueError("--case needs --check FILE, your repaired file")
    if args.check:
        return check(args.number, args.check, args.case, console)
    return write(args.number, args.out, console) if args.out else complain(args.number, console)


def chosen_trace(args: argparse.Namespace, seed: int) -> tuple[list[Row], str]:
    """And what it is called, with the memory that it is served in."""
    seed = seed if args.seed is None else args.seed
    rows, name = (read_trace(args.trace), args.trace.name) if args.trace else (draw_trace(seed), f"seed {seed}")
    return rows, f"{name}, {args.memory}{', hybrid' if args.hybrid else ''}"


def chosen_setup(args: argparse.Namespace, trace: list[Row]) -> Setup:
    setup = setup_for(memory_bytes := size_of("--memory", args.memory))
    longest = max(row.prompt_tokens + row.output_tokens for row in trace)
    if longest > setup.num_blocks * setup.block_size:
        needed = -(-longest // setup.block_size) * BLOCK_BYTES
        what = f"a request of the trace has {longest:,} tokens, which take {needed:,} bytes of keys and values"
        raise ValueError(f"{what}; --memory gives {memory_bytes:,}")
    return setup


def digest_of(trace: list[Row], setup: Setup, hybrid: bool) -> str:
    """Equal for runs that the board compares: of equal traces, whatever they are called, in equal memory."""
    return hashlib.sha256(repr((trace, setup.num_blocks, hybrid)).encode()).hexdigest()[:16]


def show_setup(console: Console, setup: Setup, label: str) -> None:
    limits = f"first token within {setup.ttft_limit_s * 1e3:,.0f} ms, then {setup.tpot_limit_s * 1e3:,.0f} ms a token"
    blocks = f"{setup.num_blocks} blocks of {setup.block_size} tokens"
    console.print(f"{label}: {blocks}; good: {limits}, on average over a request", markup=False)


def reference_verdict(trace: list[Row], setup: Setup, args: argparse.Namespace) -> Verdict | None:
    """Our policy's; a student's edition does not have it."""
    if not REFERENCE.exists():
        return None
    return judge(REFERENCE, trace, setup, args.limit, args.hybrid, OURS)


def show(
    console: Console, verdicts: list[Verdict], baseline: Verdict | None = None, ours: Verdict | None = None
) -> None:
    """baseline, ours: the ends of the scale."""
    console.print(table_of(verdicts, baseline, ours))
    columns = "goodput: good requests a second; late: the first token was; slow: the others were"
    scale = "; scale: where it is between the engine by itself (0 %) and our policy (100 %)"
    console.print(columns + scale * (ours is not None), style="dim")
    for verdict in verdicts:
        if verdict.problem:
            console.print(f"{readable(verdict.name, 40)} is refused: {verdict.problem}", markup=False, soft_wrap=True)
        if verdict.printed:
            console.print(f"{readable(verdict.name, 40)} printed:\n{verdict.printed}", markup=False, style="dim")
