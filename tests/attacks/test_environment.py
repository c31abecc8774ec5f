"""Attacks by what the daemon finds around it: Python's and the linker's variables, the current directory, HOME."""

import os
import shutil
import sys
from pathlib import Path

from tests import REPOSITORY
from tests.attacks.site import Site
from tests.attacks.support import Mode, Must, Who, attack, each
from tests.client import Client
from tests.peer import environment

# fmt: off
MODULES = (
    "sitecustomize.py", "usercustomize.py", "vmgahp/__init__.py", "vmgahp/cli.py", "os.py", "re.py", "json.py",
    "typing.py", "subprocess.py", "libvirt.py", "classad2/__init__.py", "htcondor2/__init__.py", "lxml/__init__.py",
    "encodings/__init__.py", "site.py", "threading.py", "signal.py", "select.py", "pycdlib/__init__.py", "hashlib.py",
)
# fmt: on
"""What a job may leave in its scratch directory, hoping that it is imported."""

# fmt: off
VARIABLES = (
    "PYTHONPATH=.", "PYTHONPATH=", "PYTHONPATH=/opt/x:", "PYTHONPATH=/opt::/srv", "PYTHONPATH=:",
    "PYTHONPATH={scratch}", "PYTHONHOME={scratch}", "PYTHONSTARTUP={scratch}/os.py", "PYTHONUSERBASE={scratch}",
    "PYTHONPLATLIBDIR=.", "PYTHONPYCACHEPREFIX={scratch}", "PYTHONSAFEPATH=", "PYTHONINSPECT=1",
    "PYTHONBREAKPOINT=os.system", "PYTHONWARNINGS=error::os.DeprecationWarning", "PYTHONEXECUTABLE={scratch}/python",
    "PYTHONIOENCODING=x", "__PYVENV_LAUNCHER__={scratch}/python", "PYTHONCASEOK=1", "PYTHONDEBUG=9",
    "PYTHONMALLOC=debug", "HOME={scratch}", "XDG_CONFIG_HOME={scratch}", "XDG_RUNTIME_DIR={scratch}",
    "TMPDIR={scratch}", "PATH=.:/usr/bin:/bin", "PATH=:/usr/bin:/bin", "PATH={scratch}:/usr/bin:/bin:/usr/sbin",
    "LC_ALL=tr_TR.UTF-8", "LC_ALL=C", "LANG=../../x", "LANGUAGE=xx", "TZ=../x", "TERM=x",
    "LIBVIRT_DEFAULT_URI=test:///default", "LIBVIRT_DEBUG=1", "BASH_ENV={scratch}/evil", "ENV={scratch}/evil", "IFS=/",
    "CDPATH=.", "OPENSSL_CONF={scratch}/evil", "XML_CATALOG_FILES={scratch}/evil", "GCONV_PATH=.",
)
# fmt: on
"""What may be in HTCondor's environment, which the starter hands on."""

# fmt: off
PROGRAMS = (
    "qemu-img", "virsh", "setpriv", "mkdir", "sh", "readlink", "python3", "python", "passt", "swtpm",
    "condor_config_val",
)
# fmt: on


def launcher(site: Site) -> Path:
    """The daemon's launcher as it is installed."""
    place = site.outer / "bin"
    place.mkdir()
    shutil.copy(REPOSITORY / "launchers" / "condor_vm-gahp", place)
    (place / "vmgahp-python").write_text(f"#!{sys.executable}\n")
    return place / "condor_vm-gahp"


@attack(Who.USER, Must.NOTHING, Mode.NONE, times=len(VARIABLES), daily=True)
def imports(site: Site) -> None:
    """Leave modules and programs to load in the scratch directory, under many environments of the starter's."""
    loaded = site.outer / "loaded"
    for name in MODULES:
        package = Path(name).parent
        if not site.path(str(package)).is_dir():
            site.node(str(package), os.mkdir)
        site.plant(name, f"open({str(loaded)!r}, 'a').write(__file__)\n".encode())
    for name in ("evil", *PROGRAMS):
        site.plant(name, f"#!/bin/sh\necho $0 >>{loaded}\n".encode(), 0o755)
    site.plant("pyvenv.cfg", f"home = {site.directory}\n".encode())
    program = launcher(site)
    for variable in VARIABLES:
        name, _, value = variable.partition("=")
        environ = environment("kvm", site.directory, VM_ALLOW_EMULATION=True)
        environ[name] = value.format(scratch=site.directory)
        with (
            open(os.devnull, "wb") as log,
            Client([str(program), "-f", "-t", "-M", "1"], environ, site.directory, log=log) as client,
        ):
            client.greeting()
            client.send_ad(*site.ad(VMPARAM_vm_Disk='"missing.img:hda:w:raw"'))
            answer = client.run("START", "kvm")
            client.quit()
        site.told.append(f"{variable}: {answer}")
        if loaded.exists():
            site.breach(f"{variable}: {loaded.read_text()} ran as root")
            loaded.unlink()
        if answer[:1] != ["1"]:
            site.breach(f"{variable}: {answer}")


test_nothing_comes_of_it = each(__name__)
