"""condor_submit itself makes of a submit file what `oracle` says that it does."""

from __future__ import annotations

from pathlib import Path

import classad2
import pytest

from tests.commands.submit import oracle, samples
from tests.lab.namespace import LAB, Namespace
from vmgahp.cli import main

pytestmark = pytest.mark.pool


BY_HAND = """\
universe = vm
executable = machine
vm_type = {vm_type}
vm_memory = 256
request_memory = 300
vm_vcpus = 2
vm_disk = disk.img:vda:w:raw
vm_networking = {networking}
vm_networking_type = nat
vm_checkpoint = true
vm_no_output_vm = true
when_to_transfer_output = ON_EXIT_OR_EVICT
vm_vnc = TRUE
+VMPARAM_vm_Exit_Port = true
+Remark = "a $(DOLLAR) and 'more'"
{more}
queue
"""


def compared(namespace: Namespace, text: str) -> None:
    """Compare what condor_submit would send to a schedd with what the oracle has."""
    lines = [line for line in text.splitlines() if not line.startswith("transfer_input_files")]  # they are not there
    (namespace.exchange / "job.sub").write_text("\n".join([*lines, ""]))
    namespace.run("condor_submit", "-dry-run", "ad", "job.sub", cwd=LAB)
    ad = classad2.parseOne((namespace.exchange / "ad").read_text())
    told = {name: classad2.ExprTree(value) for name, value in oracle.attributes(text).items()}
    assert {name: str(ad.lookup(name)) for name in told} == {name: str(value) for name, value in told.items()}
    of_vm = {name for name in ad if name.startswith(("JobVM", "VMPARAM_"))}
    assert of_vm - set(told) <= {"JobVMCheckpoint", "JobVMVNCConsole", "JobVMHardwareVT"}


@pytest.mark.parametrize("words", samples.SOURCES, ids=lambda words: words[0])
def test_these_are_the_attributes_of_what_is_written(words: tuple[str, ...], home: Path, namespace: Namespace) -> None:
    main(["vmgahp", "submit", *words, "--lax", "-o", "job.sub"])
    compared(namespace, (home / "job.sub").read_text())


@pytest.mark.parametrize("networking", ["true", "false"])
@pytest.mark.parametrize(
    ("vm_type", "more"), [("KVM", ""), ("xen", "xen_kernel = a\nxen_root = b\nxen_kernel_params = c d"), ("qemu", "")]
)
def test_these_are_the_attributes_of_the_file(vm_type: str, more: str, networking: str, namespace: Namespace) -> None:
    """A disk is that of a kvm or xen job alone."""
    compared(namespace, BY_HAND.format(vm_type=vm_type, more=more, networking=networking))
