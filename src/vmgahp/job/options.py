"""The options of a job's VM, ``VMPARAM_vm_<Name>``: their names, and their values in a job.

``VMPARAM_vm_<Name>`` is the usual form. ``VM_ATTR_<name>`` is the same for any hypervisor, and
``VM_<type>_ATTR_<name>`` is for jobs that run as this VM type: it overrides the other two, and is ignored for
jobs of another type. An unknown name of these three forms is refused, for a job that misspells an option would
otherwise run without it; ``VMPARAM_vm_Ignore_Unknown = true`` makes it run.
"""

from vmgahp import errors
from vmgahp.errors import JobFault
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import OPTION_PREFIX as PREFIX
from vmgahp.job.attributes import OPTIONS
from vmgahp.text import shown

GENERAL = "VM_ATTR_"

ARCH = "Arch"
CLOCK = "Clock"
DATA_DISK = "Data_Disk"
DATA_FILES = "Data_Files"
DISK_SIZE = "Disk_Size"
EXIT_PORT = "Exit_Port"
FIRMWARE = "Firmware"
IGNORE_UNKNOWN = "Ignore_Unknown"
META_DATA = "Meta_Data"
NETWORK_CONFIG = "Network_Config"
NICS = "NICs"
RUN = "Run"
RUN_AS_ROOT = "Run_As_Root"
RUN_BOOT = "Run_Boot"
RUN_BOOT_TIMEOUT = "Run_Boot_Timeout"
RUN_INPUTS = "Run_Inputs"
RUN_OUTPUTS = "Run_Outputs"
RUN_TIME_LIMIT = "Run_Time_Limit"
SHARE = "Share"
SHARE_DIRS = "Share_Dirs"
SSH = "SSH"
TOPOLOGY = "Topology"
TPM = "TPM"
USER_DATA = "User_Data"
USER_DATA_FORMAT = "User_Data_Format"

NAMES = tuple(row.name.removeprefix(PREFIX) for row in OPTIONS)
"""The options that can be written in all three forms: the rows of the table in `attributes`."""

OTHERS = ("disk", "name", "types")
"""The other names with ``VMPARAM_vm_``: vm_disk and the list of VM types, read elsewhere, and the name that this
daemon gives."""


class Options:
    """The options of one job. The constructor raises `JobFault` for an unknown name, or two that contradict each other.

    With `others_know` unknown names are accepted, since LIBVIRT_XML_SCRIPT describes the VM and may know them.
    """

    def __init__(self, ad: JobAd, *, others_know: bool = False) -> None:
        self._ad = ad
        self._attributes: dict[str, str] = {}
        """The effective attribute of each option, by the option's name in lower case."""
        self.ignored: tuple[str, ...] = ()
        """The unknown attributes, in a job that ignores them."""
        own = f"VM_{ad.vm_type()}_ATTR_"
        known = {name.lower(): name for name in NAMES}
        unknown = []
        for prefix in (PREFIX, GENERAL, own):  # the last one counts
            for attribute in ad.names(prefix):
                option = attribute[len(prefix) :].lower()
                if option in known:
                    self._take(option, attribute, overrides=prefix == own)
                elif prefix != PREFIX or option not in OTHERS:
                    unknown.append(attribute)
        if unknown and not others_know and not self.boolean(IGNORE_UNKNOWN):
            raise JobFault(
                errors.MISMATCHED,
                f"{unknown[0]} = {shown(ad.expression(unknown[0]))}: there is no such option.",
                f"write one of {', '.join(PREFIX + name for name in NAMES)}, or set "
                f"{PREFIX}{IGNORE_UNKNOWN} = true to run without it.",
            )
        self.ignored = () if others_know else tuple(unknown)

    def attribute(self, option: str) -> str:
        """Return the attribute that sets the option, for messages; the usual one if the job does not set it."""
        return self._attributes.get(option.lower(), PREFIX + option)

    def shown(self, option: str) -> str:
        """Format the option as ``Attribute = value``, for messages."""
        name = self.attribute(option)
        value = self._ad.string(name)
        return f"{name} = {shown(self._ad.expression(name) if value is None else value)}"

    def has(self, option: str) -> bool:
        """Return True if the job sets the option."""
        return option.lower() in self._attributes

    def about(self, beginning: str) -> bool:
        """Return True if the job sets an option with this prefix."""
        return any(option.startswith(beginning.lower()) for option in self._attributes)

    def string(self, option: str) -> str:
        """Return a string without surrounding blanks, empty if unset. Raises `JobFault` if it is not a string."""
        if option.lower() not in self._attributes:
            return ""
        value = self._ad.string(self.attribute(option))
        if value is None:
            raise self.refused(option, "it is not a string", f'write it in quotes, +{PREFIX}{option} = "…".')
        return value.strip()

    def boolean(self, option: str) -> bool:
        """Return true or false, false if unset. Raises `JobFault` for any other value."""
        if option.lower() not in self._attributes:
            return False
        value = self._ad.boolean(self.attribute(option))
        if value is None:
            raise self.refused(option, "it is neither true nor false", f"write +{PREFIX}{option} = true, or false.")
        return value

    def integer(self, option: str, most: int) -> int:
        """Return an integer from 1 to `most`, 0 if unset. Raises `JobFault` for anything else."""
        if option.lower() not in self._attributes:
            return 0
        value = self._ad.value(self.attribute(option))
        if type(value) is not int or not 0 < value <= most:
            problem = f"it is not a whole number from 1 to {most}"
            raise self.refused(option, problem, f"write +{PREFIX}{option} = 600, without quotes, or remove it.")
        return value

    def is_text(self, option: str) -> bool:
        """Return True if the job sets the option to a string."""
        return option.lower() in self._attributes and self._ad.string(self.attribute(option)) is not None

    def refused(self, option: str, problem: str, hint: str) -> JobFault:
        """Make the fault for an invalid option; `problem` and `hint` are sentences, the first without its end."""
        return JobFault(errors.MISMATCHED, f"{self.shown(option)}: {problem}.", hint)

    def _take(self, option: str, attribute: str, *, overrides: bool) -> None:
        expression = self._ad.expression(attribute) or ""
        if expression.lower() == "undefined":
            return
        other = self._attributes.get(option)
        if other is not None and not overrides and self._ad.expression(other) != expression:
            raise JobFault(
                errors.MISMATCHED,
                f"{other} = {shown(self._ad.expression(other))} and {attribute} = {shown(expression)} contradict "
                "each other.",
                f"keep one of {other} and {attribute}.",
            )
        self._attributes[option] = attribute
