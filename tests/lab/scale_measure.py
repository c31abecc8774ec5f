"""Measures the unit costs that `scale_model` reckons with: one node with many VMs, a probe, an overlay, an ad.

All of it happens in one namespace (`namespace`) with a libvirtd, a collector and a startd of its own; `scale_watch`
does what must be done inside.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab.guest import filling_sector, make_guest
from tests.lab.namespace import LAB, OUR_SERVER, REFERENCE_SERVER, LabError, Namespace, build_wheel, wait_until
from tests.lab.pool import CONFIG, DOMAIN, USER

Say = Callable[[str], object]

JOB_AD = Path(__file__).with_name("job.ad")
WATCH = "/usr/local/sbin/scale-python"
"""A copy of the interpreter, whose pages are not shared with those of the servers."""
EXECUTE = "/srv/execute"
IMAGES = f"{LAB}/images"
CATALOG = f"{IMAGES}/catalog.toml"

TEST_URI, QEMU_URI = "test+unix:///default", "qemu:///system"
"""libvirt's test driver behind a libvirtd, which has the clients and workers that QEMU's driver has; and QEMU."""

SIMULATED, REAL = (1, 20, 200), (1, 20)
"""How many servers with a VM each are measured at once."""

QUIET = 60
"""Seconds in which nobody asks the most of them, as long as the figures of a VM are kept by default."""

ADS = 10_000
"""Machine ads that the collector is given."""
ROUNDS = 5
"""Probes, overlays and the like, of which the median counts."""
MATCHES = 20_000

CHECKPOINT_MIB = 1024
"""The memory of the guest that is checkpointed."""

IMAGE_GIB = 4
"""The virtual size of the image that overlays are made of; nothing of it is on the disk."""

COLLECTOR = f"""\
DAEMON_LIST = MASTER, COLLECTOR, STARTD
VM_GAHP_DEBUG =
VM_CATALOG = {CATALOG}
VM_IMAGE_DIRS = {IMAGES}
FILETRANSFER_PLUGINS = $(FILETRANSFER_PLUGINS), /opt/vmgahp/bin/vmgahp-image-plugin
"""

OF_THE_REFERENCE = ("VM_GAHP_VERSION", "VM_Type", "VM_Memory", "VM_Networking", "VM_Networking_Types", "VM_HardwareVT")
"""What HTCondor's own server prints as well."""


def measure(root: str | Path | None, say: Say) -> dict[str, Any]:
    """All unit costs. Raises `LabError`."""
    with tempfile.TemporaryDirectory(prefix="vmgahp-scale-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        with Namespace(Path(directory, "lab"), root) as namespace:
            namespace.install(build_wheel(directory))
            lab = Lab(namespace)
            lab.prepare()
            found: dict[str, Any] = {
                "when": time.strftime("%Y-%m-%d", time.gmtime()),
                "processors": os.cpu_count(),
                "versions": lab.versions(),
            }
            for key, part in (
                ("probe", lab.probe),
                ("plugin", lab.plugin),
                ("checkpoint", lab.checkpoint),
                ("ads", lab.ads),
                ("simulated", lambda: [lab.node(number, TEST_URI, say) for number in SIMULATED]),
                ("real", lambda: [lab.node(number, QEMU_URI, say) for number in REAL]),
                ("without libvirtd", lambda: lab.node(REAL[-1], QEMU_URI, say, with_libvirtd=True)),
            ):
                say(key)
                found[key] = part()
            return found


class Lab:
    """What is measured in one namespace."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.uid = self.gid = 0

    def prepare(self) -> None:
        """libvirt, HTCondor, images, and what measures."""
        run = self.namespace.run
        self.namespace.start_libvirt()
        self.uid, self.gid = (int(run("id", option, USER).stdout) for option in ("-u", "-g"))
        run("install", "-d", "-m", "755", EXECUTE, IMAGES)
        run("install", "-d", "-o", "condor", f"{LAB}/log")
        run("qemu-img", "create", "-q", "-f", "qcow2", f"{IMAGES}/base.qcow2", f"{IMAGE_GIB}G")
        self.namespace.path(CATALOG).write_text('[base]\npath = "base.qcow2"\nformat = "qcow2"\n')
        make_guest(self.namespace.exchange / "guest.img", None)
        shutil.copy(Path(__file__).with_name("scale_watch.py"), self.namespace.exchange)
        run("cp", "--dereference", "/usr/bin/python3", WATCH)
        config = CONFIG.format(lab=LAB, domain=DOMAIN, server=OUR_SERVER) + COLLECTOR
        self.namespace.path("/etc/condor/config.d/99-lab.config").write_text(config)

    def versions(self) -> dict[str, str]:
        """What was measured."""
        out = {
            name: self.namespace.run(*command).stdout.split()
            for name, command in {
                "vmgahp": [OUR_SERVER, "-version"],
                "HTCondor": ["condor_version"],
                "Python": ["/usr/bin/python3", "--version"],
                "libvirt": ["libvirtd", "--version"],
            }.items()
        }
        return {name: words[-1] if name == "libvirt" else words[1] for name, words in out.items()}

    def watch(self, task: Mapping[str, Any]) -> Any:
        """Have `scale_watch` do something."""
        errors = self.namespace.exchange / "watch.err"
        with errors.open("w") as file:
            process = self.namespace.popen(
                *(WATCH, "-I", f"{LAB}/scale_watch.py"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file
            )
            out, _ = process.communicate(json.dumps(task))
        if process.returncode:
            log = self.namespace.exchange / "VMGahpLog"
            lines = log.read_text(errors="replace").splitlines()[-8:] if log.exists() else []
            raise LabError(
                "\n".join([f"the measurement failed (exit {process.returncode}):", errors.read_text(), *lines])
            )
        return json.loads(out)

    def environment(self, vm_type: str, **settings: object) -> dict[str, str]:
        """What condor_starter or condor_startd would set, and settings of a file instead of HTCondor's."""
        values = {"VM_MEMORY": 1024, "VM_GAHP_LOG": f"{LAB}/VMGahpLog", "VM_ALLOW_EMULATION": "True"} | settings
        path = self.namespace.exchange / "settings"
        path.write_text("".join(f"{name} = {value}\n" for name, value in values.items()))
        return {
            **self.namespace.environment(),
            "VMGAHP_CONFIG": f"{LAB}/settings",
            "VMGAHP_VMTYPE": vm_type,
            "VMGAHP_USER_UID": str(self.uid),
            "VMGAHP_USER_GID": str(self.gid),
        }

    def job(self, vm_type: str, **settings: object) -> dict[str, Any]:
        """What `scale_watch` must know of servers and their jobs."""
        return {
            "vm_type": vm_type,
            "argv": [OUR_SERVER, "-f", "-M", "3"],
            "environment": self.environment(vm_type, **settings),
            "errors": f"{LAB}/errors",
            "execute": EXECUTE,
            "image": f"{LAB}/guest.img",
            "uid": self.uid,
            "gid": self.gid,
            "ad": JOB_AD.read_text().splitlines(),
        }

    # ---- the parts ------------------------------------------------------------------------------

    def node(self, servers: int, uri: str, say: Say, *, with_libvirtd: bool = False) -> dict[str, Any]:
        """So many servers with a VM each, at once; and whether libvirtd is killed with them, for good."""
        say(f"  {servers} at {uri}")
        simulated = uri == TEST_URI
        vm_type = "libvirt" if simulated else "kvm"
        settings = {"VM_LIBVIRT_URI": uri, "VM_LIBVIRT_DOMAIN_TYPE": "test"} if simulated else {}
        task = self.job(vm_type, **settings)
        found: dict[str, Any] = self.watch(
            {
                **task,
                "servers": servers,
                "uri": uri,
                "quiet": QUIET if servers == max(SIMULATED) else 0,
                "with libvirtd": with_libvirtd,
            }
        )
        if found["refused"]:
            raise LabError(f"of {servers} VMs {found['started']} have started; others said: {found['refused'][:3]}")
        return found

    def probe(self) -> dict[str, Any]:
        """The probe: the first one since the boot, those after it, and what HTCondor's own prints."""
        environ = self.environment("kvm", VM_CATALOG=CATALOG)
        ours = {"argv": [OUR_SERVER, "-f", "-t", "-M", "0", "vmtype", "kvm"], "environment": environ, "watched": IMAGES}
        theirs = {
            "argv": [REFERENCE_SERVER, *ours["argv"][1:]],
            "environment": {**environ, "_CONDOR_USE_SHARED_PORT": "False"},
        }
        first, *again, reference = self.watch({"programs": [ours] * (ROUNDS + 1) + [theirs]})
        later = typical(again)
        return {
            "first": {key: first[key] for key in ("seconds", "cpu")},
            "later": {key: later[key] for key in ("seconds", "cpu")},
            "image files opened": later["opened"],
            "ours": _size(first["output"]),
            "reference": _size(reference["output"]),
        }

    def plugin(self) -> dict[str, Any]:
        """An overlay that the transfer plugin makes."""
        scratch = f"{EXECUTE}/dir_1"
        self.namespace.run("install", "-d", "-o", USER, scratch)
        made = f"{scratch}/disk.qcow2"
        program = {
            "argv": ["/opt/vmgahp/bin/vmgahp-image-plugin", f"nfs://{IMAGES}/base.qcow2:disk.qcow2", made],
            "environment": self.environment("kvm", VM_IMAGE_DIRS=IMAGES),
            "directory": scratch,
            "uid": self.uid,
            "gid": self.gid,
            "watched": IMAGES,
            "remove": [made],
        }
        found = typical(self.watch({"programs": [program] * ROUNDS}))
        on_disk = self.namespace.path(made).stat().st_blocks * 512
        self.namespace.run("rm", "-r", scratch)
        return {key: found[key] for key in ("seconds", "cpu", "opened")} | {"bytes": on_disk}

    def checkpoint(self) -> dict[str, Any]:
        """A checkpoint of a guest of which half is random and the rest was never touched."""
        image = self.namespace.exchange / "half.img"
        image.write_bytes(filling_sector(CHECKPOINT_MIB).ljust(1 << 20, b"\0"))
        task = self.job("kvm", VM_MEMORY=2 * CHECKPOINT_MIB)
        memory = str(CHECKPOINT_MIB)
        job = {"JobVMMemory": memory, "RequestMemory": memory, "JobVMCheckpoint": "true"}
        found: dict[str, Any] = self.watch({**task, "image": f"{LAB}/half.img", "job": job})
        return found | {"MiB": CHECKPOINT_MIB}

    def ads(self) -> dict[str, Any]:
        """A machine's ad, with what the probe adds to it: its bytes, the collector's memory and time, and a match."""
        run = self.namespace.run
        run("condor_master")
        command = ["condor_status", "-constraint", "PartitionableSlot && HasVM", "-long"]
        text = str(wait_until("the startd's ad", lambda: run(*command, check=False).stdout.strip(), 120))
        added = [line for line in text.splitlines() if is_ours(line)]
        without = "\n".join(line for line in text.splitlines() if not is_ours(line))
        [collector] = [pid for pid, words in self.namespace.processes().items() if words.startswith("condor_collector")]
        states = [self._collector(collector)]
        for name, ad in (("without", without), ("with", text)):
            file = self.namespace.exchange / "ads"
            with file.open("w") as out:
                for number in range(ADS):
                    out.write(renamed(ad, f"slot1@{name}{number}.lab") + "\n\n")
            run("condor_advertise", "-multiple", "UPDATE_STARTD_AD", f"{LAB}/ads", timeout=200)
            file.unlink()
            states.append(self._collector(collector))
        before, base, full = states
        run("condor_off", "-fast", "-master", check=False)
        return {
            "number": ADS,
            "bytes": len(text),
            "attributes": len(text.splitlines()),
            "added bytes": sum(len(line) + 1 for line in added),
            "added attributes": len(added),
            "collector KiB without": base[0] - before[0],
            "collector KiB with": full[0] - base[0],
            "collector seconds without": base[1] - before[1],
            "collector seconds with": full[1] - base[1],
            "match": match_costs(without, text),
            "job": job_bytes(JOB_AD.read_text().splitlines()),
        }

    def _collector(self, pid: int) -> tuple[int, float]:
        """Its private memory in KiB and its CPU time in seconds, once it has nothing more to do."""
        process = self.namespace.path(f"/proc/{pid}")
        used = [-1.0]

        def is_idle() -> bool:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            used.append(sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK"))
            return used[-1] == used[-2]

        wait_until("the collector", is_idle, 60, interval=1)
        status = (process / "status").read_text().split()
        return int(status[status.index("RssAnon:") + 1]), used[-1]


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name.strip(), value.strip()) for name, _, value in (line.partition("=") for line in text.splitlines())]


def is_ours(line: str) -> bool:
    """Whether a line of a machine's ad is an attribute that our probe adds to what HTCondor's own prints."""
    name = line.partition("=")[0].strip()
    startd = ("VM_AvailNum", "VM_Guest_Mem", "VM_MAX_NUMBER")
    return name == "HasVirshDefaultNetwork" or (name.startswith("VM_") and name not in (*OF_THE_REFERENCE, *startd))


def renamed(ad: str, name: str) -> str:
    """The ad of another slot."""
    changed = {"Name": name, "Machine": name.partition("@")[2]}
    kept = [line for line in ad.splitlines() if line.partition("=")[0].strip() not in changed]
    return "\n".join([*(f'{key} = "{value}"' for key, value in changed.items()), *kept])


def match_costs(without: str, full: str) -> dict[str, float]:
    """Microseconds for a match of a job with a machine that takes it, by HTCondor's own engine.

    The job asks for no more than HTCondor makes it ask, of a machine without what the probe adds and of one with it;
    and it asks for what is only published by us.
    """
    import classad2

    job = classad2.parseOne("\n".join(JOB_AD.read_text().splitlines()))
    job["Requirements"] = classad2.ExprTree("TARGET.HasVM =?= true && TARGET.VM_Type == MY.JobVMType")
    asking = classad2.parseOne("\n".join(JOB_AD.read_text().splitlines()))
    asking["Requirements"] = classad2.ExprTree(
        "TARGET.HasVM =?= true && TARGET.VM_Type == MY.JobVMType"
        ' && stringListMember("qemu", TARGET.VM_HYPERVISORS) && TARGET.VM_kvm_ATTR_checkpoint'
    )

    def microseconds(one: Any, machine: str) -> float:
        other = classad2.parseOne(machine)
        other["Requirements"] = classad2.ExprTree("true")
        if not one.symmetricMatch(other):
            raise LabError("the job does not match the machine that it is to match")
        rounds = []
        for _ in range(ROUNDS):
            began = time.process_time()
            for _ in range(MATCHES // ROUNDS):
                one.symmetricMatch(other)
            rounds.append((time.process_time() - began) / (MATCHES // ROUNDS) * 1e6)
        return statistics.median(rounds)

    return {
        "plain": microseconds(job, without),
        "with ours": microseconds(job, full),
        "asking": microseconds(asking, full),
    }


def job_bytes(ad: Sequence[str]) -> dict[str, int]:
    """A job's ad, and what of it is there for the VM."""
    of_vm = [line for line in ad if line.startswith(("JobVM", "VMPARAM"))]
    return {"bytes": sum(len(line) + 1 for line in ad), "VM bytes": sum(len(line) + 1 for line in of_vm)}


def typical(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The medians of what several rounds have found."""
    numbers = [key for key, value in found[0].items() if isinstance(value, int | float)]
    return {key: statistics.median(each[key] for each in found) for key in numbers}


def rounded(found: Any) -> Any:
    """The same with four digits that mean something: more is noise in a file that is kept."""
    if isinstance(found, float):
        return float(f"{found:.4g}")
    if isinstance(found, Mapping):
        return {key: rounded(value) for key, value in found.items()}
    return [rounded(value) for value in found] if isinstance(found, list) else found


def _size(output: str) -> dict[str, int]:
    return {"bytes": len(output), "attributes": len(_pairs(output))}
