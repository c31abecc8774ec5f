"""The login to vSphere: the server, the account, and the server's certificate.

The password is read from its file for every login and kept nowhere. The file must be readable by root, who runs jobs,
and by HTCondor's own user, as whom the startd probes this VM type, and by no other user: it belongs to that user (or
to root if the probe runs as root) and has the mode 0600 or 0400.
"""

import os
import pwd
import ssl
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from vmgahp.config import Settings
from vmgahp.errors import MachineFault

LONGEST_PASSWORD = 4096
HTTPS = 443


class Access(NamedTuple):
    """The server and the account, as the settings name them."""

    host: str
    """A name or an address, without the brackets of IPv6."""
    port: int
    user: str

    @classmethod
    def from_settings(cls, settings: Settings) -> "Access":
        """Read the settings. Raises `MachineFault` for a missing setting or an invalid address."""
        text = _needed(settings, "VSPHERE_HOST", "the name of the ESXi host or vCenter")
        is_ipv6 = text.count(":") > 1 and not text.startswith("[")
        try:
            found = urlsplit(f"//[{text}]" if is_ipv6 else f"//{text}")
            host, port = found.hostname, found.port
        except ValueError:
            host = port = None
        if not host or found.netloc != found.geturl()[2:] or port == 0:
            raise MachineFault(
                f"VSPHERE_HOST = {text} ({settings.where('VSPHERE_HOST')}) is not a server.",
                "set VSPHERE_HOST to a host name, with :port where that is not 443.",
            )
        return cls(host, port or HTTPS, _needed(settings, "VSPHERE_USER", "the account for this machine's jobs"))

    def __str__(self) -> str:
        return self.host if self.port == HTTPS else f"{self.host}:{self.port}"


def _needed(settings: Settings, name: str, what: str) -> str:
    value = settings.string(name)
    if not value:
        raise MachineFault(f"{name} is not set, and vSphere cannot be used without it.", f"set {name} to {what}.")
    return value


def _full_path(name: str, path: str) -> str:
    if not path.startswith("/"):  # the current directory is the job's
        raise MachineFault(f"{name} = {path} is not a full path.", "name the file by its full path.")
    return path


def read_password(settings: Settings) -> str:
    """Read the password: the first line of its file. Raises `MachineFault`, whose text never has any of it."""
    path = _full_path("VSPHERE_PASSWORD_FILE", _needed(settings, "VSPHERE_PASSWORD_FILE", "a file with the password"))
    said, mend = f"VSPHERE_PASSWORD_FILE = {path}", f"chown condor: {path}; chmod 0600 {path}"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as file:
            found, data = os.fstat(file.fileno()), file.read(LONGEST_PASSWORD + 1)
    except OSError as error:
        raise MachineFault(f"{said} cannot be read by uid {os.geteuid()}: {error.strerror}.", f"{mend}.") from error
    if found.st_mode & 0o077 or found.st_uid not in _owners(settings.string("LOG")):
        raise MachineFault(
            f"{said} has the mode {found.st_mode & 0o7777:04o} and belongs to uid {found.st_uid}: others than root and "
            "HTCondor's user may use it.",
            f"{mend}; and change the password: somebody may have read it.",
        )
    try:
        password = data.decode().partition("\n")[0].removesuffix("\r")
    except UnicodeDecodeError:
        password = ""
    if not password or len(data) > LONGEST_PASSWORD:
        raise MachineFault(
            f"{said} has no password in its first line, or is no such file at all.",
            "write the password into its first line, as UTF-8.",
        )
    return password


def _owners(log_directory: str) -> set[int]:
    """Return the users that may own the password file: root, this one, and HTCondor's, who owns its log directory."""
    owners = {0, os.geteuid()}
    with suppress(ValueError):
        owners.add(int(os.environ.get("CONDOR_IDS", "").partition(".")[0]))
    with suppress(KeyError):
        owners.add(pwd.getpwnam("condor").pw_uid)
    with suppress(OSError):
        owners.add(os.stat(log_directory).st_uid)
    return owners


def tls_context(settings: Settings) -> ssl.SSLContext:
    """Return the TLS context that verifies the server: by VSPHERE_TLS_PIN, else by this machine's CAs.

    With VSPHERE_TLS_VERIFY off the server is not verified. Raises `MachineFault` for a pin that cannot be used.
    pyvmomi's own pinning by thumbprint accepts a wrong certificate if that verifies otherwise (9.1.1.0), and it
    trusts every server on this machine.
    """
    pin = settings.string("VSPHERE_TLS_PIN")
    try:
        context = ssl.create_default_context(cafile=_full_path("VSPHERE_TLS_PIN", pin) if pin else None)
    except OSError as error:  # SSLError is one
        raise MachineFault(
            f"VSPHERE_TLS_PIN = {pin} cannot be used: {error.strerror}.",
            "save the server's certificate there: openssl s_client -connect HOST:443 </dev/null | openssl x509.",
        ) from error
    if pin:
        # The pinned certificate is trusted by itself, regardless of its issuer and its name.
        context.check_hostname = False
        context.verify_flags = ssl.VERIFY_X509_PARTIAL_CHAIN
    elif not settings.boolean("VSPHERE_TLS_VERIFY"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
