"""Memory: the machine's, or that of the container in which the process runs."""

from pathlib import Path

import pytest

from nanovllm.files.system import available_bytes, installed_bytes

MB = 1 << 20
NO_LIMIT_V1 = 9223372036854771712


def v2(folder: str, limit: object, usage: int, cached: int) -> dict[str, str]:
    path = f"sys/fs/cgroup/{folder}"
    stat = f"anon {usage - cached}\nfile {cached}\ninactive_file {cached}"
    return {f"{path}/memory.max": str(limit), f"{path}/memory.current": str(usage), f"{path}/memory.stat": stat}


def v1(folder: str, limit: int, usage: int, cached: int) -> dict[str, str]:
    path = f"sys/fs/cgroup/memory{folder}/memory"
    stat = f"cache 0\ninactive_file 0\ntotal_inactive_file {cached}"  # the first two: without the groups below
    return {f"{path}.limit_in_bytes": str(limit), f"{path}.usage_in_bytes": str(usage), f"{path}.stat": stat}


IN_V2, IN_V1 = {"proc/self/cgroup": "0::/a/b"}, {"proc/self/cgroup": "5:cpu:/c\n4:memory:/docker/1\n0::/"}
LARGE = {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 51200 kB"}  # 50 MB are available
SYSTEMS = {  # the files; the least of the machine's memory and this is installed; how much is available
    "no cgroups": (LARGE, None, 50 * MB),
    "v2, no limit": (LARGE | IN_V2 | v2("a/b", "max", 20 * MB, 0), None, 50 * MB),
    "v2": (LARGE | IN_V2 | v2("a/b", 32 * MB, 20 * MB, 0), 32 * MB, 12 * MB),
    "v2, cached files": (LARGE | IN_V2 | v2("a/b", 32 * MB, 30 * MB, 25 * MB), 32 * MB, 27 * MB),
    "v2, a group above": (
        LARGE | IN_V2 | v2("a/b", 32 * MB, 8 * MB, 0) | v2("a", 40 * MB, 38 * MB, MB),
        32 * MB,
        3 * MB,
    ),
    "v2 in a container": (LARGE | IN_V2 | v2("", 32 * MB, 20 * MB, 0), 32 * MB, 12 * MB),
    "v2, less is left in the machine": (LARGE | IN_V2 | v2("a/b", 640 * MB, 0, 0), 640 * MB, 50 * MB),
    "v2, full": (LARGE | IN_V2 | v2("a/b", 32 * MB, 33 * MB, 0), 32 * MB, 0),
    "v1": (LARGE | IN_V1 | v1("/docker/1", 32 * MB, 30 * MB, 25 * MB), 32 * MB, 27 * MB),
    "v1 in a container": (LARGE | IN_V1 | v1("", 32 * MB, 20 * MB, 0), 32 * MB, 12 * MB),
    "v1, no limit": (LARGE | IN_V1 | v1("/docker/1", NO_LIMIT_V1, 20 * MB, 0), None, 50 * MB),
    "no meminfo": (IN_V2 | v2("a/b", 32 * MB, 0, 0), 32 * MB, 16 * MB),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_memory_of_a_container(tmp_path, name):
    files, limit, available = SYSTEMS[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert installed_bytes(tmp_path) == (limit or installed_bytes(Path("/no/such/folder")))
    assert available_bytes(tmp_path) == available
