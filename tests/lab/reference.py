"""The script by which HTCondor's own server runs a guest by emulation: its own domain XML asks for KVM."""

from pathlib import Path

from tests.lab.programs import a_program

DOMAIN_XML = """\
<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>{memory}</memory>
  <os><type>hvm</type></os>
  <features><acpi/></features>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw'/><source file='{disk}'/><target dev='hda' bus='ide'/>
    </disk>
  </devices>
</domain>
"""
SCRIPT = """\
#!/bin/sh
ad=$(cat)
value() { printf '%s\\n' "$ad" | sed -n "s/^$1 *= *//p" | tr -d '"'; }
disk=$(value VMPARAM_vm_Disk)
case $disk in /*) ;; *) disk=$(value VM_WORKING_DIR)/$disk ;; esac
sed -e "s|{name}|$(value VMPARAM_VM_NAME)|" -e "s|{memory}|$(value JobVMMemory)|" \\
    -e "s|{disk}|${disk%%:*}|" /lab/domain.xml
"""


def describe(directory: Path) -> None:
    """Put HTCondor's description of an emulated guest, and the script that fills it, into what is /lab inside."""
    (directory / "domain.xml").write_text(DOMAIN_XML)
    a_program(directory / "describe-vm", SCRIPT)
