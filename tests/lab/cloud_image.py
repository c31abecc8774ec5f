"""Debian 12 with cloud-init, made of Debian's packages by ``vmgahp image build``: what tests of the real thing boot.

scripts/test has it made (`setup_cloud_image` in scripts/lib/setup.sh). Nobody writes to it: each guest has an overlay.
"""

import os
from pathlib import Path

IMAGE = Path(os.environ.get("VMGAHP_LAB", "/var/cache/vmgahp-lab")) / "cloud-image/debian-12.qcow2"
MEMORY_MIB = 512
BOOT = 600.0
"""Seconds that it may take to cloud-init's last stage where nothing but emulation is to be had, and little of that."""


def why_none() -> str:
    """Why no test can boot it; empty where one can."""
    return "" if IMAGE.exists() else f"there is no {IMAGE} (scripts/test --libvirt makes it)"
