"""How to log in to vSphere: where the server is, which user, and its certificate.

The password is read from its file for every login and kept nowhere. The file must be readable by root, who
runs jobs, and by HTCondor's own user, as whom the startd probes this VM type, and by nobody else: it
belongs to that user (or to root where the probe runs as root) and has the mode 0600 or 0400.
"""

import os
import ssl
from stat import S_ISREG
from typing import NamedTuple

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
    password_file: str
    log_directory: str
    """HTCondor's log directory, which belongs to HTCondor's user; empty where it is not known."""

    @classmethod
    def from_settings(cls, settings: Settings) -> "Access":
        """Raises `MachineFault` for what is missing or no address."""
        text = _needed(settings, "VSPHERE_HOST", "the name of the ESXi host or vCenter")
        host, port = text, str(HTTPS)
        if text.startswith("["):
            host, _, port = text[1:].partition("]")
            port = port.removeprefix(":") or str(HTTPS)
        elif text.count(":") == 1:
            host, _, port = text.partition(":")
        if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536 or "/" in text:
            raise MachineFault(
                f"VSPHERE_HOST = {text} ({settings.where('VSPHERE_HOST')}) is not a server.",
                "set VSPHERE_HOST to a host name, with :port where that is not 443.",
            )
        return cls(
            host,
            int(port),
            _needed(settings, "VSPHERE_USER", "the account for this machine's jobs"),
            _needed(settings, "VSPHERE_PASSWORD_FILE", "the full path of a file with its password"),
            settings.string("LOG"),
        )

    def __str__(self) -> str:
        return self.host if self.port == HTTPS else f"{self.host}:{self.port}"


def _needed(settings: Settings, name: str, what: str) -> str:
    value = settings.string(name)
    if not value:
        raise MachineFault(f"{name} is not set, and vSphere cannot be used without it.", f"set {name} to {what}.")
    return value


def read_password(path: str, log_directory: str = "") -> str:
    """The password in a file: its first line. Raises `MachineFault`, whose text never has any of it.

    `log_directory` belongs to HTCondor's user, who may own the file.
    """
    if not path.startswith("/"):
        raise MachineFault(f"VSPHERE_PASSWORD_FILE = {path} is not a full path.", "name the file by its full path.")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise MachineFault(
            f"VSPHERE_PASSWORD_FILE = {path} cannot be read by uid {os.geteuid()}: {error.strerror}.",
            f"let the file belong to HTCondor's user, with the mode 0600: chown condor: {path}.",
        ) from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not S_ISREG(found.st_mode):
            raise MachineFault(
                f"VSPHERE_PASSWORD_FILE = {path} is not a regular file.", "write the password into a file."
            )
        if found.st_mode & 0o077:
            raise MachineFault(
                f"VSPHERE_PASSWORD_FILE = {path} has the mode {found.st_mode & 0o7777:04o}: others than its "
                "owner may use it.",
                f"chmod 0600 {path}, and change the password: somebody may have read it.",
            )
        if found.st_uid not in _owners(log_directory):
            raise MachineFault(
                f"VSPHERE_PASSWORD_FILE = {path} belongs to uid {found.st_uid}, who is neither root nor "
                "HTCondor's user.",
                f"chown condor: {path}",
            )
        data = file.read(LONGEST_PASSWORD + 1)
    try:
        password = data.decode().partition("\n")[0].removesuffix("\r")
    except UnicodeDecodeError:
        password = ""
    if not password or len(data) > LONGEST_PASSWORD:
        raise MachineFault(
            f"VSPHERE_PASSWORD_FILE = {path} has no password in its first line, or is no such file at all.",
            "write the password into its first line, as UTF-8.",
        )
    return password


def _owners(log_directory: str) -> set[int]:
    """Who may own the password file: root, we ourselves, and HTCondor's user, by whatever name."""
    import pwd

    owners = {0, os.geteuid()}
    named = os.environ.get("CONDOR_IDS", "").partition(".")[0]
    if named.isdigit():
        owners.add(int(named))
    try:
        owners.add(pwd.getpwnam("condor").pw_uid)
    except KeyError:
        pass
    try:
        owners.add(os.stat(log_directory).st_uid)
    except OSError:
        pass
    return owners


class _Pinned(ssl.SSLContext):
    """Accepts a server with one of some certificates, and no other, whoever has signed it.

    pyvmomi's own pinning by thumbprint accepts a wrong certificate where that verifies otherwise (9.1.1.0), and
    it trusts every server on this machine; so the comparison is made here, where each connection is.
    """

    pins: frozenset[bytes] = frozenset()

    def wrap_socket(self, *arguments, **named):  # type: ignore[no-untyped-def]
        """As `ssl.SSLContext.wrap_socket`. Raises `ssl.SSLCertVerificationError` for another certificate."""
        secured = super().wrap_socket(*arguments, **named)
        if secured.getpeercert(True) not in self.pins:
            secured.close()
            raise ssl.SSLCertVerificationError(1, "its certificate is not the one that VSPHERE_TLS_PIN holds")
        return secured


def tls_context(settings: Settings) -> ssl.SSLContext:
    """How the server proves who it is: by VSPHERE_TLS_PIN, else by this machine's certificate authorities, else,
    with VSPHERE_TLS_VERIFY off, not at all. Raises `MachineFault` for a pin that cannot be used."""
    pin = settings.string("VSPHERE_TLS_PIN")
    if pin:
        pinned = _Pinned(ssl.PROTOCOL_TLS_CLIENT)
        pinned.check_hostname = False
        pinned.verify_mode = ssl.CERT_NONE  # compared instead, byte by byte
        pinned.pins = _read_pins(pin)
        return pinned
    context = ssl.create_default_context()
    if not settings.boolean("VSPHERE_TLS_VERIFY"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _read_pins(path: str) -> frozenset[bytes]:
    end = "-----END CERTIFICATE-----"
    try:
        with open(path, encoding="ascii") as file:
            blocks = file.read(1 << 20).split(end)[:-1]
        found = frozenset(
            ssl.PEM_cert_to_DER_cert(block[block.index("-----BEGIN CERTIFICATE-----") :] + end) for block in blocks
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a PEM file"
        raise MachineFault(
            f"VSPHERE_TLS_PIN = {path} cannot be used: {reason}.",
            "save the server's certificate: openssl s_client -connect HOST:443 </dev/null | openssl x509.",
        ) from error
    if not found:
        raise MachineFault(
            f"VSPHERE_TLS_PIN = {path} holds no certificate.", "write the server's certificate into it, as PEM."
        )
    return found
