"""A checkpoint in the scratch directory, of any driver: its files, and the manifest about them.

The manifest is written last, so files without one are not a checkpoint. It tells whose checkpoint it is, the conditions
for a restore, and the state of the disks: memory and disks belong together, and a guest that wakes up on a disk that
has changed since destroys the data on it.

All of it travels with the job, which can change it. So the manifest protects the job from mistakes, not the machine
from the job. The machine is protected by the user who opens the files (the job's user: `vmgahp.host.job_user`), by the
check of the head of a memory image before a hypervisor reads it (`vmgahp.checkpoint.memory_image`), and by restoring
our own domain XML (`vmgahp.domain.restore`).
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from vmgahp import errors
from vmgahp.checkpoint import manifest
from vmgahp.checkpoint.manifest import BACKING, DISK, MEMORY, STATE, CheckpointFile, CheckpointKind, Manifest
from vmgahp.checkpoint.memory_image import Damaged
from vmgahp.host import job_user
from vmgahp.host.job_user import Identity
from vmgahp.host.system_calls import Opened
from vmgahp.job.vm_spec import VmSpec

MANIFEST_FILE = "vm_checkpoint.json"
MEMORY_FILE = "vm_checkpoint.mem"
"""The name of the memory image for drivers that write one themselves."""

RESTARTING = MANIFEST_FILE + ".restarting"
"""The manifest of a checkpoint whose guest runs, or is about to: the checkpoint is no longer valid."""

IMAGE_EXTRA = 256 << 20
"""The bytes by which a memory image may exceed the memory: video memory, devices, the format's own. A larger one is
refused unread: a sparse file of a petabyte takes no space, but reading it takes days."""

HINT = "look at the file system of the scratch directory; the VM keeps running."

_MOST_REFUSED = 1000
_REFUSED = ".refused-"

SAMPLE_ENDS, SAMPLE_SIZE, SAMPLES = 1 << 20, 64 << 10, 32
"""The parts of an image that are sampled: its first and last MiB, and 32 pieces of 64 KiB between: 4 MiB of any image,
however large, in 5 ms from the page cache and in a few dozen seeks from a disk. An image of up to 4 MiB is read as a
whole."""

_CHUNK = 1 << 20

Record = TypeVar("Record")
AnyFile = TypeVar("AnyFile", CheckpointFile, "FileRef")


class Unusable(Exception):
    """A checkpoint that cannot be restored; the text says why.

    `disks_intact` is true if every disk is known to be as it was at the checkpoint. A guest that then boots afresh
    finds its disks as after a power cut; otherwise the state of its disks is unknown. `by_accident` is true if the
    failure says nothing about the checkpoint, such as a hypervisor's process that was killed.
    """

    def __init__(self, reason: str, disks_intact: bool, *, by_accident: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.disks_intact = disks_intact
        self.by_accident = by_accident


class FileRef(NamedTuple):
    """A reference to a file that is to be described."""

    role: str
    path: str
    """A name in the scratch directory, or a full path there or elsewhere."""
    device: str = ""
    writable: bool = False
    format: str = ""
    known_as: str = ""
    """The name of an image of the catalog, or of one of its backing files: on another machine it has another path and
    another modification time."""

    @classmethod
    def of(cls, then: CheckpointFile) -> FileRef:
        """Make a reference to the same file as it is now."""
        return cls(then.role, then.path, then.device, then.writable, then.format)


class CheckpointStore(NamedTuple):
    """The checkpoint of one scratch directory."""

    kind: CheckpointKind
    identity: Identity
    directory: str
    log: Callable[[str], None]

    # Making one

    def now(self, vm: VmSpec, facts: manifest.Facts, cpu_seconds: float = 0.0) -> Manifest:
        """Make the manifest of a VM as it is now, without files; to be written, or compared with an earlier one."""
        head = (self.kind.driver, vm.name, vm.vm_type, vm.memory_mib, vm.vcpus)
        return Manifest(*head, cpu_seconds, time.time(), facts)

    def write(self, now: Manifest, refs: Iterable[FileRef], hint: str = HINT) -> None:
        """Write the manifest of a checkpoint whose files are all in place, atomically. Raises `errors.MachineFault`."""
        try:
            whole = now._replace(files=tuple(describe(self.identity, self.directory, ref) for ref in refs))
            write_record(self.identity, self.directory, MANIFEST_FILE, manifest.dump(self.kind, whole), self._parse)
        except (OSError, manifest.Invalid, errors.MachineFault) as error:
            problem = f"The checkpoint of {now.name} cannot be completed: {error}."
            raise errors.MachineFault(problem, hint, errors.CANNOT_SAVE) from error

    # Finding one

    def load(self) -> Manifest | None:
        """Read the manifest; None if there is no checkpoint. Raises `Unusable` and `errors.MachineFault`."""
        return find_record(self.identity, self.directory, MANIFEST_FILE, self._parse)

    def exists(self) -> bool:
        """Return True if there is a checkpoint, valid or not; also if it cannot be read."""
        try:
            return self.load() is not None
        except (Unusable, errors.Fault):
            return True

    def check(self, then: Manifest, now: Manifest, refs: Iterable[FileRef]) -> None:
        """Check that the checkpoint can be restored here, for the job as it is `now`, on the files that it has now.

        A memory image is not checked yet (`open_memory`). Raises `Unusable` with all the reasons, and
        `errors.MachineFault`.
        """
        refs = tuple(refs)

        def changes(*roles: str) -> list[str]:
            saved = [file for file in then.files if file.role in roles]
            current = [ref for ref in refs if ref.role in roles]
            return differences(self.identity, self.directory, saved, current)

        changed = changes(DISK, BACKING)
        reasons = []
        if then.name != now.name:
            reasons.append(f"it is the checkpoint of {then.name!a}, and this is {now.name}")
        if then.vm_type != now.vm_type:
            reasons.append(f"the VM type was {then.vm_type!a} and is {now.vm_type} now")
        if (then.memory_mib, then.vcpus) != (now.memory_mib, now.vcpus):
            size = f"{now.memory_mib} MiB and {now.vcpus}"
            reasons.append(f"the VM had {then.memory_mib} MiB and {then.vcpus} CPUs, and is to have {size} now")
        reasons += [*self.kind.differences(then.facts, now.facts), *changes(STATE), *changed]
        if reasons:
            raise Unusable("; ".join(reasons) + ".", self.kind.knows_disks and not changed)

    def open_memory(self, then: Manifest, memory_mib: int) -> int:
        """Check the memory image and return its descriptor, to restore exactly this file. Raises as `load`."""
        name = self.kind.memory
        saved = next((file for file in then.files if file.role == MEMORY), None)
        if saved is None:
            raise Unusable(f"{name} is not among its files.", True)
        if saved.size > (memory_mib << 20) + IMAGE_EXTRA:
            raise Unusable(f"{name} is larger than {memory_mib} MiB of memory can be.", True)
        descriptor = -1
        try:
            descriptor = self.identity.open_scratch(self.directory, name, os.O_RDONLY)
            size = os.fstat(descriptor).st_size
            if size != saved.size:
                raise Unusable(f"{name} has {size} bytes, and had {saved.size}.", True)
            self.kind.inspect(descriptor)
            if sample(descriptor, size) != saved.digest:
                raise Unusable(f"{name} is damaged: the content of its samples has changed.", True)
        except BaseException as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, OSError) and errors.is_perhaps_the_machines(error):
                raise unreadable(self.identity, self.directory, name, error) from error
            if isinstance(error, OSError):
                raise Unusable(f"{name} cannot be opened: {error.strerror}.", True) from error
            if isinstance(error, Damaged):
                raise Unusable(f"{name} cannot be used: {error}", True) from error
            raise
        return descriptor

    # One that cannot be used

    def refuse(
        self, name: str, unusable: Unusable, own: Iterable[str] = (), *, fresh_disks: bool = False
    ) -> Callable[[], None]:
        """Set the checkpoint of the VM `name` aside, with the files of its `own`, and log why.

        The guest then boots afresh; if that fails, the returned function makes the files a checkpoint again. Raises
        `errors.JobFault` if the disks are not known to be as they were: their state is unknown to a guest that boots
        from them, and the job's owner has to decide. With `fresh_disks` it boots from other disks of the job, which no
        guest has written to.
        """
        kept = self.set_aside(own)
        problem = f"The checkpoint of {name} cannot be used: {unusable.reason.rstrip('.')}."
        if not (unusable.disks_intact or fresh_disks):
            hint = "submit the job again with disks that are in order; the checkpoint's files end in .refused."
            raise errors.JobFault(errors.MISMATCHED_CHECKPOINT, problem, hint)
        self.log(f"{problem} It is kept as {', '.join(kept) or 'it was'}; the guest boots afresh.")
        return lambda: self._take_back(kept)

    def set_aside(self, own: Iterable[str] = ()) -> list[str]:
        """Rename a checkpoint's files to free names ``<name>.refused-<n>``, and return these. Errors are logged."""
        made = []
        for name in (MANIFEST_FILE, RESTARTING, *self._own_files(), *own):  # the rest is never valid
            try:
                made += self._set_aside(name)
            except (OSError, errors.Fault) as error:
                self.log(f"{name} cannot be set aside: {error}")
        return made

    def _set_aside(self, name: str) -> list[str]:
        for number in range(1, _MOST_REFUSED):
            new = f"{name}{_REFUSED}{number}"
            try:
                self.identity.rename_scratch(self.directory, name, new, replace=False)
            except FileExistsError:
                continue
            except FileNotFoundError:
                return []
            return [new]
        raise OSError(errno.EEXIST, "there are too many refused checkpoints", self.directory)

    def _take_back(self, kept: list[str]) -> None:
        """Rename the files that were `set_aside` back, the manifest last. Errors are logged."""
        for new in reversed(kept):
            name = new.rpartition(_REFUSED)[0]
            try:
                if name != MANIFEST_FILE or self._is_as_it_was(new):
                    self.identity.rename_scratch(self.directory, new, name, replace=False)
            except (OSError, Unusable, errors.Fault) as error:
                self.log(f"{new} cannot be renamed to {name}: {error}")

    # One that is used

    def begin_restart(self) -> None:
        """Invalidate the checkpoint, because the guest will change its disks. On `errors.Fault` it must not run."""
        try:
            self.identity.rename_scratch(self.directory, MANIFEST_FILE, RESTARTING)
        except FileNotFoundError:
            pass
        except OSError as error:
            problem = f"{MANIFEST_FILE} cannot be renamed to {RESTARTING} ({error.strerror})."
            hint = "see that nothing else of the job's has this name."
            raise errors.JobFault(errors.MISMATCHED_CHECKPOINT, problem, hint) from error

    def forget_interrupted(self) -> None:
        """Remove the rest of a checkpoint whose guest was running when its daemon was killed. Errors are logged.

        Its disks have changed since: without a later checkpoint the guest boots from them, as after a power cut.
        """
        try:
            if not self.identity.has_scratch(self.directory, RESTARTING):
                return
        except (OSError, errors.Fault):
            return
        later = self.exists()
        if not later:
            self.log("A guest that was restored here was cut off: it boots from its disks, as after a power cut")
        self._forget(RESTARTING, *([] if later else self._own_files()))

    def put_back(self) -> None:
        """Make the checkpoint valid again, because the guest has not run after all. Errors are logged.

        A hypervisor that fails may have let it run all the same: if a file was written to meanwhile, it stays invalid.
        """
        try:
            if self._is_as_it_was(RESTARTING):
                self.identity.rename_scratch(self.directory, RESTARTING, MANIFEST_FILE)
        except (OSError, Unusable, errors.Fault) as error:
            self.log(f"{RESTARTING} cannot be renamed to {MANIFEST_FILE}: {error}")

    def discard(self, *own: str) -> None:
        """Remove the checkpoint, if there is one, and the files of its `own`. Errors are logged."""
        self._forget(MANIFEST_FILE, RESTARTING, *self._own_files(), *own)

    # What helps

    def _is_as_it_was(self, name: str) -> bool:
        """Return True if no file of a manifest was written to since. Raises OSError, `Unusable`, `Fault`."""
        found = find_record(self.identity, self.directory, name, self._parse)
        if found is None:
            return False
        since = self._status(name).st_ctime_ns
        for file in found.files:
            if file.transferred and file.role in (DISK, STATE) and self._status(file.path).st_mtime_ns > since:
                self.log(f"{file.path!a} was written to: the guest has run, and its checkpoint is no longer valid")
                return False
        return True

    def _status(self, name: str) -> os.stat_result:
        with Opened(self.identity.open_scratch(self.directory, name, os.O_RDONLY)) as descriptor:
            return os.fstat(descriptor)

    def _parse(self, data: bytes) -> Manifest:
        return manifest.parse(self.kind, data)

    def _own_files(self) -> tuple[str, ...]:
        return (self.kind.memory,) if self.kind.memory else ()

    def _forget(self, *names: str) -> None:
        job_user.forget(self.identity, self.directory, self.log, *names)


# Files that come back with a job


def describe(identity: Identity, directory: str, ref: FileRef) -> CheckpointFile:
    """Describe the file, with a sample of it, read as the job's user. Raises OSError and `errors.MachineFault`."""
    inside = _inside(directory, ref.path)
    try:
        if inside is None:
            descriptor = identity.open_named(ref.path, os.O_RDONLY)
        else:
            descriptor = identity.open_scratch(directory, inside, os.O_RDONLY)
        with Opened(descriptor):
            status = os.fstat(descriptor)
            size = status.st_size
            digest = sample(descriptor, size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, ref.path) from error
    return CheckpointFile(
        role=ref.role,
        path=ref.known_as or (ref.path if inside is None else inside),
        transferred=inside is not None,
        device=ref.device,
        writable=ref.writable,
        format=ref.format,
        size=size,
        mtime_ns=0 if ref.known_as else status.st_mtime_ns,
        digest=digest,
    )


def differences(
    identity: Identity, directory: str, saved: Iterable[CheckpointFile], current: Iterable[FileRef]
) -> list[str]:
    """List the differences from the saved files, whatever their paths are now. Raises `errors.Fault`."""
    then, now = _by_device(saved), _by_device(current)
    if then.keys() != now.keys():
        return [f"the disks were {', '.join(then) or 'none'} and are {', '.join(now) or 'none'} now"]
    reasons = []
    for device, refs in now.items():
        about = f"disk {device}" if device else ""
        if len(refs) != len(then[device]):
            had, has = len(then[device]) - 1, len(refs) - 1
            reasons.append(f"{about or 'it'} had {had} backing files and has {has} now")
            continue
        pairs = zip(then[device], refs, strict=True)
        found = [why for file, ref in pairs if (why := _difference(identity, directory, file, ref))]
        # One reason is enough for a disk; for other files all are given.
        reasons += [f"{about}: {found[0]}"] if about and found else found
    return reasons


def _by_device(files: Iterable[AnyFile]) -> dict[str, list[AnyFile]]:
    found: dict[str, list[AnyFile]] = {}
    for file in files:
        found.setdefault(file.device, []).append(file)
    return found


def _difference(identity: Identity, directory: str, then: CheckpointFile, ref: FileRef) -> str:
    try:
        now = describe(identity, directory, ref)
    except OSError as error:
        if _inside(directory, ref.path) is not None and errors.is_perhaps_the_machines(error):
            raise unreadable(identity, directory, ref.path, error) from error
        return f"{ref.path!a} cannot be opened ({error.strerror})"  # the job chose the file system
    if (then.role, then.writable) != (now.role, now.writable):
        return f"{now.path!a} was {_words(then)} and is {_words(now)} now"
    if (then.path, then.transferred) != (now.path, now.transferred):
        return f"it was in {then.path!a} and is in {now.path!a} now"
    if then.format != now.format:
        return f"{now.path!a} had the format {then.format} and has {now.format} now"
    if then.size != now.size:
        return f"{now.path!a} had {then.size} bytes and has {now.size} now"
    if then.digest != now.digest:
        return f"the content of {now.path!a} has changed"
    # A transfer gives a file a new modification time.
    if not now.transferred and 0 not in (then.mtime_ns, now.mtime_ns) and then.mtime_ns != now.mtime_ns:
        return f"{now.path!a} has been written to since"
    return ""


def _words(file: CheckpointFile) -> str:
    return f"a {'writable' if file.writable else 'read-only'} {file.role}"


def unreadable(identity: Identity, directory: str, path: str, error: OSError) -> errors.Fault:
    """Make the fault for a file that its file system cannot read: its content is unknown, and the checkpoint stays."""
    hint = "see what is wrong with it; a checkpoint of the job stays as it is."
    problem = f"{path!a} cannot be read ({error.strerror})."
    return job_user.blame(error, directory, identity, problem, hint, errors.MISMATCHED_CHECKPOINT)


def _inside(directory: str, path: str) -> str | None:
    """Return the path relative to the scratch directory, or None for a file elsewhere."""
    if not path.startswith("/"):
        return path
    start = directory.rstrip("/") + "/"
    rest = path.removeprefix(start)
    plain = all(part not in ("", ".", "..") for part in rest.split("/"))
    return rest if path.startswith(start) and plain else None


def sample(descriptor: int, size: int) -> str:
    """Compute the SHA-256 of the size of an image and a few pieces of it, in hexadecimal."""
    digest = hashlib.sha256(b"%d\n" % size)
    for offset, length in _pieces(size):
        digest.update(os.pread(descriptor, length, offset))
    return digest.hexdigest()


def _pieces(size: int) -> list[tuple[int, int]]:
    between = size - 2 * SAMPLE_ENDS
    if between <= SAMPLES * SAMPLE_SIZE:
        return [(offset, min(_CHUNK, size - offset)) for offset in range(0, size, _CHUNK)]
    step = (between - SAMPLE_SIZE) / (SAMPLES - 1)
    return [
        (0, SAMPLE_ENDS),
        *((SAMPLE_ENDS + int(number * step), SAMPLE_SIZE) for number in range(SAMPLES)),
        (size - SAMPLE_ENDS, SAMPLE_ENDS),
    ]


# Records: small JSON files, of which a manifest is one


def find_record(identity: Identity, directory: str, name: str, parse: Callable[[bytes], Record]) -> Record | None:
    """Read a record of the scratch directory; None if there is none. Raises `Unusable` and `errors.Fault`."""
    try:
        # One byte more, so that one that is too long stays too long.
        data = identity.read_scratch(directory, name, manifest.LARGEST + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        if errors.is_perhaps_the_machines(error):
            raise unreadable(identity, directory, name, error) from error
        raise Unusable(f"{name} cannot be opened: {error.strerror}.", False) from error
    try:
        return parse(data)
    except manifest.Invalid as error:
        raise Unusable(f"{name} cannot be read: {error}", False) from error


def write_record(identity: Identity, directory: str, name: str, data: bytes, parse: Callable[[bytes], object]) -> None:
    """Write the record `name` atomically. Raises OSError, and `Invalid` for one that `parse` would refuse."""
    parse(data)
    identity.write_scratch(directory, name, data)
