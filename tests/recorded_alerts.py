"""Metrics recorded from a gateway, and the alerts of deploy/prometheus/rules.yaml on them as promtool evaluates them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

from deploy_files import DEPLOY
from metrics_figures import Labels, read

STEP_S = 15
"""Time between two pages, and between two evaluations of the rules: that of deploy/prometheus/prometheus.yml."""

ALL_FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'
_FAILED = re.compile(r"time: (?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?,\s+exp: nil\s+got: (.*)")
_NAME = re.compile(r'alertname="(\w+)"')


class Recording:
    """The pages of one gateway, one each STEP_S."""

    def __init__(self) -> None:
        self._pages: list[dict[tuple[str, Labels], float]] = []

    def add(self, page: bytes) -> None:
        """The next page, as `/metrics` sends it."""
        self._pages.append(read(page))

    def __len__(self) -> int:
        return len(self._pages)

    def firing(self, directory: Path) -> list[set[str]]:
        """The names of the alerts that fire at each page; the input of promtool is written to `directory`."""
        path = shutil.which("promtool")
        assert path is not None, "promtool is not installed (on Debian: apt-get install prometheus)"
        # Expected to be empty at each page: promtool names what it got instead.
        tests = [
            {"expr": ALL_FIRING, "eval_time": f"{number * STEP_S}s", "exp_samples": []}
            for number in range(len(self._pages))
        ]
        content = {
            "rule_files": [str(DEPLOY / "prometheus" / "rules.yaml")],
            "evaluation_interval": f"{STEP_S}s",
            "tests": [{"interval": f"{STEP_S}s", "input_series": self._series(), "promql_expr_test": tests}],
        }
        file = directory / "recorded.json"
        file.write_text(json.dumps(content))
        ran = subprocess.run(
            [path, "test", "rules", str(file)], capture_output=True, text=True, check=False, timeout=300
        )
        assert ran.returncode in (0, 1), ran.stderr
        firing: list[set[str]] = [set() for _ in self._pages]
        for hours, minutes, seconds, names in _FAILED.findall(ran.stdout + ran.stderr):
            at_s = 3600 * int(hours or 0) + 60 * int(minutes or 0) + int(seconds or 0)
            firing[at_s // STEP_S] = set(_NAME.findall(names))
        assert (ran.returncode == 1) is any(firing), ran.stderr
        return firing

    def _series(self) -> list[dict[str, str]]:
        keys = dict.fromkeys(key for page in self._pages for key in page)
        up = [{"series": 'up{job="tierlane-gateway",instance="a"}', "values": f"1x{len(self._pages)}"}]
        return up + [
            {
                "series": f"{name}{{{_text(labels | {('instance', 'a')})}}}",
                "values": " ".join(repr(page[name, labels]) if (name, labels) in page else "_" for page in self._pages),
            }
            for name, labels in keys
        ]


def _text(labels: Labels) -> str:
    return ",".join(f"{name}={json.dumps(value)}" for name, value in sorted(labels))
