"""The kill mode (``-M 4``), which destroys a VM for a startd whose starter has vanished."""

from collections.abc import Mapping
from contextlib import closing

from vmgahp import config, errors
from vmgahp.drivers import base
from vmgahp.host.job_user import Identity
from vmgahp.host.starter import scratch_in
from vmgahp.log import Log


def kill(vm_type: str, match: str, uuid: str, environ: Mapping[str, str], *, to_stderr: bool) -> int:
    """Destroy the VM that `match` names and return the exit status; a missing VM is a success."""
    log = Log()
    try:
        settings = config.load(environ)
        log.open(settings, to_stderr=to_stderr)
        driver = base.find(vm_type)(vm_type, settings, Identity.from_environ(environ), log.always)
        with closing(driver):
            found = driver.kill(scratch_in(match) if match.startswith("/") else match, uuid)
    except errors.Fault as fault:
        reason = f"kill mode, {match}: {fault.render()}"
        log.always(reason)
        log.tell_stderr(reason)
        return 1
    log.always(f"kill mode: {match} {'was destroyed' if found else 'does not exist'}")
    return 0
