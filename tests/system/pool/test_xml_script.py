"""LIBVIRT_XML_SCRIPT in a real pool: a script of the shape that pools have, and the submit files that go with it."""

from pathlib import Path

import pytest
from tests.lab.guest import make_guest, read_count
from tests.lab.namespace import LAB
from tests.lab.pool import Pool
from tests.lab.programs import a_program
from tests.system.pool.outcomes import END, own_pool

pytestmark = pytest.mark.pool

SCRIPT = r"""#!/usr/bin/awk -f
{ name = $1; sub(/^[^=]*= /, ""); gsub(/\\?"/, ""); ad[name] = $0 }
function disk(file, device) {
    print "<disk type='file'><source file='" file "'/><target dev='" device "'/></disk>"
}
END {
    print "<domain type='qemu'><name>" ad["VMPARAM_VM_NAME"] "</name><title>" ad["Note"] "</title>"
    print "<memory>" ad["JobVMMemory"] * 1024 "</memory><vcpu>1</vcpu><os><type>hvm</type></os>"
    print "<features><acpi/><apic/><pae/></features><on_poweroff>destroy</on_poweroff><devices>"
    print "<console type='pty'><source path='/dev/ptmx'/></console>"
    split(ad["VMPARAM_vm_Disk"], field, ":")
    if (field[1] == "/dev/null") disk("/lab/images/" ad["Image"], "hda")
    else disk(ad["VM_WORKING_DIR"] "/" field[1], field[2])
    print "</devices></domain>"
}
"""
"""The ad's words in between tags; an image of the administrator's for a job that brings none."""

NO_DISK = 'vm_disk = /dev/null:null:null\ntransfer_input_files =\n+Image = "site.img"\n'


def prepare(pool: Pool) -> None:
    a_program(pool.directory / "make-xml", SCRIPT)
    (pool.directory / "images").mkdir()
    make_guest(pool.directory / "images" / "site.img", 1)


pool = own_pool("xml-script", f"LIBVIRT_XML_SCRIPT = {LAB}/make-xml\n", prepare)


def brings_a_disk(directory: Path) -> None:
    make_guest(directory / "guest.img", 1)


def test_a_pools_own_script_and_its_submit_files_work(pool: Pool) -> None:
    pool.offering()
    evil = pool.submit("evil", brings_a_disk, '+Note = "</title><description/><title>"\n')
    own = pool.submit("own", brings_a_disk, '+Note = "Alice, at the lab"\n')
    sites = pool.submit("sites", lambda _home: None, NO_DISK)
    evil.wait_for_event("held", END)
    assert "VMGAHP_ERR_JOBCLASSAD" in evil.ad()["HoldReason"]
    own.wait_for_event("terminated", END)
    sites.wait_for_event("terminated", END)
    assert read_count(own.directory / "guest.img") == 1
    assert read_count(pool.directory / "images" / "site.img") == 1
    assert pool.machine()["HasVM"] is True
