"""The tutorial about a program in a VM, typed as it stands in a real pool, with the real image."""

import re

import pytest
from tests import REPOSITORY
from tests.lab import cloud_image
from tests.lab.pool import USER, Pool
from tests.system.pool.outcomes import own_pool

WHY_NOT = cloud_image.why_none()
pytestmark = [pytest.mark.pool, pytest.mark.timeout(4500), pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)]

PAGE = REPOSITORY / "docs/tutorial/your-program.md"
HOME = "/home/tutorial"
BUILT = "/var/tmp/debian-12.qcow2"


def steps() -> dict[str, list[tuple[str, str]]]:
    """What is to be typed in each step, and what is shown behind it."""
    found = {}
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```sh\n(.*?)^```\n(?:\n((?: {4}[^\n]*\n)+))?", part, re.DOTALL | re.MULTILINE)
        found[part[:1]] = [(typed, re.sub("^ {4}", "", shown, flags=re.MULTILINE)) for typed, shown in blocks]
    return found


def prepare(pool: Pool) -> None:
    """The image is there, since another test builds one, and HTCondor is not yet; the rest of step 2 is typed."""
    pool.run("install", "-d", "-o", USER, HOME)
    pool.run("ln", "-sfT", "/opt/vmgahp/bin/vmgahp", "/usr/bin/vmgahp")  # the page has the package's paths
    pool.namespace.path(BUILT).write_bytes(cloud_image.IMAGE.read_bytes())
    typed = steps()["2"][0][0].splitlines()
    lines = [line for line in typed if "vmgahp image build" not in line]
    assert len(lines) == len(typed) - 1
    assert any(BUILT in line for line in typed if line not in lines)
    pool.run("bash", "-e", "-c", "\n".join(lines))


pool = own_pool("tutorial", "", prepare)


def test_the_tutorial_does_what_it_shows(pool: Pool) -> None:
    pool.offering()
    (_, (asked, answer)), *others = (steps()[number] for number in "2345")
    assert pool.run("bash", "-c", asked, user=USER).stdout == answer
    for typed, shown in (block for blocks in others for block in blocks):
        said = pool.run("bash", "-e", "-c", typed, user=USER, cwd=HOME, timeout=1800).stdout
        assert not shown or said == shown, f"{typed}{said}{pool.diagnosis()}"
