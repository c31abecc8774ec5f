"""The page of what was tested on what, made from the record of a full run."""

import json
from pathlib import Path


def test_the_page_shows_where_the_tests_ran(tmp_path: Path) -> None:
    import tested_on

    node = {"system": "Debian 13", "security": "AppArmor", "libvirt": "11.3.0", "QEMU": "10.0.2", "HTCondor": "23.9.6"}
    part = {"system": "Debian 12", "date": "2026-11-25", "passed": 4, "failed": 1, "ran on": [[node, 5]]}
    record = tmp_path / "tried.json"
    record.write_text(json.dumps({"parts": {"node": part}}))
    rows = tested_on.table(record).splitlines()
    [row] = [row for row in rows if "AppArmor" in row and "11.3.0" in row]
    assert row.endswith("| Debian 13, AppArmor | 11.3.0 | 10.0.2 | 23.9.6 | 5 | 1 | 2026-11-25 |")
    assert sum("not recorded yet" in row for row in rows) == len(tested_on.PARTS) - 1
