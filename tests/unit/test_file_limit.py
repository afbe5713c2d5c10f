"""The limit of open files of a gateway."""

import subprocess
import sys

import pytest

PROBE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
from tierlane.roles.gateway import raise_file_limit
raise_file_limit(int(sys.argv[2]))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("hard", "connections", "warned"), [(4000, 1000, False), (500, 1000, True)])
def test_the_soft_limit_is_raised_to_the_hard_limit(hard: int, connections: int, warned: bool) -> None:
    """A hard limit that is too low for the allowed connections is logged."""
    command = [sys.executable, "-c", PROBE, str(hard), str(connections)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip().endswith(str(hard))
    assert ("few_files" in done.stdout) is ("LimitNOFILE" in done.stdout) is warned
