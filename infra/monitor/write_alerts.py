"""`alerts.yml` beside this file, made of the monitor's rules: `python infra/monitor/write_alerts.py`."""

from __future__ import annotations

from pathlib import Path

import yaml

from atoll_monitor.alerts import prometheus_groups

FILE = Path(__file__).parent / "alerts.yml"
HEAD = """\
# Alerts on the metrics of `atoll monitor` (docs/how-to/monitor-a-run.md), made by write_alerts.py of the rules in
# services/monitor/atoll_monitor/alerts.py, which say what they mean. alerts_test.yml plays each of them.
"""

if __name__ == "__main__":
    FILE.write_text(HEAD + yaml.safe_dump(prometheus_groups(), sort_keys=False, width=1000), encoding="utf-8")
