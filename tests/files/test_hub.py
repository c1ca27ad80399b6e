"""What is downloaded of a repository: what is read, and nothing else."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from nanovllm.files.hub import resolve_checkpoint
from nanovllm.tools import cli


@pytest.fixture
def downloaded(checkpoint, monkeypatch, tmp_path) -> Path:
    """Where the hub's copy is. Of every repository it is the same: a checkpoint with Mistral's own files beside it."""
    names = [path.name for path in checkpoint().iterdir()]
    names += ["README.md", "consolidated.safetensors", "consolidated.safetensors.index.json", "params.json"]

    def snapshot_download(repository, *, allow_patterns, ignore_patterns=None, revision=None):
        for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            source = checkpoint() / name
            shutil.copy(source, tmp_path) if source.exists() else (tmp_path / name).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return tmp_path


def test_mistrals_second_copy_of_the_weights(downloaded):
    assert resolve_checkpoint("owner/name") == downloaded
    assert [path.name for path in downloaded.glob("*.safetensors")] == ["model.safetensors"]
    assert not any(downloaded.glob("consolidated*"))


def test_no_weights_are_needed(downloaded, tmp_path_factory, capsys):
    log = tmp_path_factory.mktemp("log") / "requests.jsonl"
    log.write_text('{"prompt": "the quick brown fox"}')
    assert cli.main(["analyze", str(log), "--model", "owner/name"]) == 0, capsys.readouterr().err
    assert "tokens" in capsys.readouterr().out
    assert (downloaded / "config.json").exists() and not any(downloaded.glob("*.safetensors"))
