"""Programs in JavaScript that people have: npm's openai, and ai (Vercel's SDK) through its three kinds of model."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.marks import by_night

HERE = Path(__file__).parent
QUIET = {"NPM_CONFIG_UPDATE_NOTIFIER": "false", "NPM_CONFIG_AUDIT": "false", "NPM_CONFIG_FUND": "false"}
PATIENCE_S = 120  # for a registry, and for a program


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Iterator[Path]:
    """clients.mjs where its packages (package.json) are; they are gone afterwards, and npm's own cache has them."""
    npm, node = shutil.which("npm"), shutil.which("node")
    version = subprocess.run([node, "--version"], capture_output=True, text=True).stdout if npm and node else "none"
    if not version.startswith("v") or int(version[1:].split(".")[0]) < 20:
        pytest.skip(f"needs Node from version 20 on, with npm; found {version.strip()}")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "clients.mjs"):
        shutil.copy(HERE / name, folder)
    command = [npm, "install", "--ignore-scripts", "--prefer-offline", "--no-package-lock"]
    try:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | QUIET, capture_output=True, text=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm has not installed the packages in {PATIENCE_S} s")
    if done.returncode:
        pytest.skip(f"npm cannot install the packages: {done.stderr[-500:]}")
    yield folder / "clients.mjs"
    shutil.rmtree(folder)


@pytest.fixture
def run(server, program):
    """run(name): what that program prints."""

    def run(name: str) -> dict:
        command = ["node", str(program), f"{server.url}/v1", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("name", ["openaiChat", by_night("openaiResponses")])
def test_openai(run, name, weather_is_told):
    weather_is_told(run(name)["answer"])


@pytest.mark.parametrize("name", ["compatible", by_night("chat"), by_night("responses")])
def test_ai_sdk(run, name, weather_is_told):
    """An agent, whole and streamed; an answer in the form of a zod schema."""
    found = run(name)
    weather_is_told(found["answer"], times=2)
    assert found["streamed"] == found["answer"] and found["numPieces"] > 5
    assert found["report"]["city"] == "Oslo" and isinstance(found["report"]["isWet"], bool)
