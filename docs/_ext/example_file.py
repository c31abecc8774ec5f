"""Print ``config/vmgahp.conf.example`` anew: every setting of the code's table below the file's own head."""

import sys
from pathlib import Path
from textwrap import wrap

from vmgahp.config import SETTINGS

FILE = Path(__file__).parents[2] / "config" / "vmgahp.conf.example"


def example() -> str:
    """Make the lines of every setting with its meaning and default; required ones have a value."""
    text = FILE.read_text().partition("\n## ")[0]
    for ours, heading in ((False, "HTCondor's own settings"), (True, "Settings of this daemon alone")):
        text += f"\n## {heading}\n"
        for setting in SETTINGS:
            if setting.ours is ours:
                kind = f"{setting.kind}, {setting.unit}" if setting.unit else setting.kind
                meaning = "\n".join("# " + line for line in wrap(f"{setting.meaning} ({kind})", 98))
                line = f"{setting.name} = {setting.example or setting.default}".rstrip()
                text += f"\n{meaning}\n{'' if setting.example else '#'}{line}\n"
    return text


if __name__ == "__main__":
    sys.stdout.write(example())
