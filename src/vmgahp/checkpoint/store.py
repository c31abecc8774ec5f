"""A checkpoint in the job's scratch directory: the memory image, and the manifest that goes with it.

The manifest is written last, so a memory image without one is not a checkpoint. It says whose the image is,
what it can be restored with, and what the disks were like: memory and disks belong together, and a guest
that wakes up on a disk that has changed since destroys what is on it.

Both files travel with the job and are the job's to change. So the manifest protects the job from mistakes,
not the machine from the job; that does who opens the files (the job's user: `vmgahp.host.job_user`), who looks
at the head of the image before libvirtd does (`vmgahp.checkpoint.memory_image`), and whose domain XML is restored
(`vmgahp.domain.restore`).
"""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence

from vmgahp.checkpoint import files, memory_image, memory_image_xen
from vmgahp.checkpoint.files import Unusable, sample
from vmgahp.checkpoint.manifest import DiskState, FileState, Invalid, Manifest, MemoryState, dump, parse
from vmgahp.host.job_user import Identity
from vmgahp.images.backing import BackingFile
from vmgahp.job.spec import Disk

MEMORY_FILE = "vm_checkpoint.mem"
MANIFEST_FILE = "vm_checkpoint.json"

IMAGE_EXTRA = 256 << 20
"""Bytes by which a memory image may be larger than the memory: video memory, devices, the format's own. A
larger one is refused unread: a file of a petabyte without content takes no room, and reading it takes days."""

_CHUNK = 1 << 20
_MOST_REFUSED = 1000


# Making one


def describe_disks(
    identity: Identity, directory: str, disks: Iterable[Disk], chains: Mapping[str, Sequence[BackingFile]]
) -> tuple[DiskState, ...]:
    """The state of the disks and of all their backing files, read as the job's user.

    `chains` are the backing files of each image, by its path (`vmgahp.images.backing.backing_chain`). Raises OSError.
    """

    return tuple(
        DiskState(
            disk.device,
            disk.writable,
            _describe(
                identity,
                directory,
                disk.path,
                disk.format,
                disk.image.known_as if disk.image and not disk.writable else "",
            ),
            tuple(
                _describe(identity, directory, layer.path, layer.format, layer.known_as)
                for layer in chains.get(disk.path, ())
            ),
        )
        for disk in disks
    )


def describe_memory(identity: Identity, directory: str, name: str = MEMORY_FILE) -> MemoryState:
    """The size and checksum of a memory image. Raises OSError.

    0.6 to 1.3 s a GiB where it was measured (SHA-256 in hardware, the image still in the page cache).
    """

    descriptor = identity.open_scratch(directory, name, os.O_RDONLY)
    try:
        return MemoryState(os.fstat(descriptor).st_size, _sha256(descriptor))
    finally:
        os.close(descriptor)


def write(identity: Identity, directory: str, manifest: Manifest) -> None:
    """Write the manifest, all or nothing; the memory image must be in its place already.

    Raises OSError, and `Unusable` for a manifest that `load` would not take, such as one that has a path
    which is not UTF-8.
    """
    try:
        files.write(identity, directory, MANIFEST_FILE, dump(manifest), parse)
    except Invalid as error:
        raise Unusable(f"The checkpoint cannot be described: {error}", True) from error


# Finding one


def load(identity: Identity, directory: str) -> Manifest | None:
    """The manifest in the scratch directory; None where there is no checkpoint. Raises `Unusable`."""
    return files.find(identity, directory, MANIFEST_FILE, parse)


def check(
    identity: Identity,
    directory: str,
    manifest: Manifest,
    *,
    name: str,
    vm_type: str,
    domain_type: str,
    host_cpu: str,
    qemu_version: int,
    memory_mib: int,
    disks: Sequence[Disk],
    chains: Mapping[str, Sequence[BackingFile]],
) -> int:
    """Whether the checkpoint can be restored here, for this job, on its disks as they are.

    Returns a descriptor of the memory image, which is the one that was looked at and therefore the one to
    restore from; the caller closes it. Raises `Unusable`. The memory image is read last and as a whole
    (`describe_memory` says how long that takes), and only where nothing else is wrong.

    An older libvirt is not refused: libvirt itself says what it cannot read.
    """
    disk_reasons = _differences(identity, directory, manifest.disks, disks, chains)
    intact = not disk_reasons
    reasons = []
    if manifest.name != name:
        reasons.append(f"it is the checkpoint of {manifest.name!a}, and this is {name}")
    if manifest.vm_type != vm_type:
        reasons.append(f"the VM type was {manifest.vm_type} and is {vm_type} now")
    if manifest.domain_type != domain_type:
        reasons.append(
            f"it was made under {_hypervisor(manifest.domain_type)}, and VMs here run under {_hypervisor(domain_type)}"
        )
    if manifest.host_cpu and host_cpu and manifest.host_cpu != host_cpu:
        reasons.append(f"it was made on another CPU ({manifest.host_cpu!a}; here: {host_cpu})")
    hypervisor = "Xen" if domain_type == "xen" else "QEMU"
    # The stable releases of one series understand each other's images, both ways.
    if manifest.qemu_version // 1000 > qemu_version // 1000:
        reasons.append(
            f"it was made by {hypervisor} {_version(manifest.qemu_version)}, and here is {_version(qemu_version)}"
        )
    if manifest.memory.size > (memory_mib << 20) + IMAGE_EXTRA:
        reasons.append(f"{MEMORY_FILE} is larger than {memory_mib} MiB of memory can be")
    reasons += disk_reasons
    if reasons:
        raise Unusable("; ".join(reasons) + ".", intact)
    return _open_memory(identity, directory, manifest.memory, domain_type)


def _open_memory(identity: Identity, directory: str, memory: MemoryState, domain_type: str) -> int:
    try:
        descriptor = identity.open_scratch(directory, MEMORY_FILE, os.O_RDONLY)
    except OSError as error:
        raise Unusable(f"{MEMORY_FILE} cannot be opened: {error.strerror}.", True) from error
    try:
        size = os.fstat(descriptor).st_size
        if size != memory.size:
            raise Unusable(f"{MEMORY_FILE} has {size} bytes, and had {memory.size}.", True)
        (memory_image_xen if domain_type == "xen" else memory_image).inspect(descriptor)
        if _sha256(descriptor) != memory.sha256:
            raise Unusable(f"{MEMORY_FILE} is damaged: its checksum is another one.", True)
    except (OSError, memory_image.Damaged) as error:
        os.close(descriptor)
        raise Unusable(f"{MEMORY_FILE} cannot be used: {error}", True) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _differences(
    identity: Identity,
    directory: str,
    saved: Sequence[DiskState],
    disks: Sequence[Disk],
    chains: Mapping[str, Sequence[BackingFile]],
) -> list[str]:
    """What is other than it was at the checkpoint, as parts of a sentence."""
    then, now = {disk.device: disk for disk in saved}, {disk.device: disk for disk in disks}
    if then.keys() != now.keys() or len(then) != len(saved):
        return [f"the disks were {', '.join(then) or 'none'} and are {', '.join(now)} now"]
    reasons = []
    for device, disk in now.items():
        try:
            [state] = describe_disks(identity, directory, [disk], chains)
        except OSError as error:
            name = error.filename if isinstance(error.filename, str) else disk.path
            reasons.append(f"disk {device}: {name!a} cannot be opened ({error.strerror})")
            continue
        difference = _difference(then[device], state)
        if difference:
            reasons.append(f"disk {device}{difference}")
    return reasons


def _difference(then: DiskState, now: DiskState) -> str:
    if then.writable != now.writable:
        return " was {} and is {} now".format(*("writable" if disk.writable else "read-only" for disk in (then, now)))
    if len(then.backing) != len(now.backing):
        return f" had {len(then.backing)} backing files and has {len(now.backing)} now"
    for was, is_ in zip((then.image, *then.backing), (now.image, *now.backing), strict=True):
        if (was.path, was.transferred) != (is_.path, is_.transferred):
            return f" was in {was.path!a} and is in {is_.path!a} now"
        if was.format != is_.format:
            return f": {is_.path!a} had the format {was.format} and has {is_.format} now"
        if was.size != is_.size:
            return f": {is_.path!a} had {was.size} bytes and has {is_.size} now"
        if was.sample != is_.sample:
            return f": the content of {is_.path!a} has changed"
        # A transfer gives a file a new time.
        if was.mtime_ns != is_.mtime_ns and not is_.transferred:
            return f": {is_.path!a} has been written to since"
    return ""


# Done with one


def set_aside(identity: Identity, directory: str, names: Sequence[str] = (MANIFEST_FILE, MEMORY_FILE)) -> list[str]:
    """Rename the files of a checkpoint that cannot be used, so that its owner can look at them.

    Returns the new names, ``<name>.refused-<n>``; no file is overwritten. Raises OSError.
    """
    made = []
    for name in names:  # the manifest first: what is left is never a checkpoint
        for number in range(1, _MOST_REFUSED):
            try:
                identity.rename_scratch(directory, name, f"{name}.refused-{number}", replace=False)
            except FileExistsError:
                continue
            except FileNotFoundError:
                break
            made.append(f"{name}.refused-{number}")
            break
        else:
            raise OSError(errno.EEXIST, "there are too many refused checkpoints", directory)
    return made


def discard(identity: Identity, directory: str) -> None:
    """Remove a checkpoint, if there is one. Raises OSError."""
    for name in (MANIFEST_FILE, MEMORY_FILE):
        identity.unlink_scratch(directory, name)


# Files


def _describe(identity: Identity, directory: str, path: str, image_format: str, known_as: str = "") -> FileState:
    """The file as it is; one of an image of the catalog under that name, for on another machine it lies elsewhere
    and was written at another time."""

    inside = _inside(directory, path)
    try:
        if inside is None:
            descriptor = identity.open_named(path, os.O_RDONLY)
        else:
            descriptor = identity.open_scratch(directory, inside, os.O_RDONLY)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    try:
        status = os.fstat(descriptor)
        return FileState(
            path=known_as or (path if inside is None else inside),
            transferred=inside is not None,
            format=image_format,
            size=status.st_size,
            mtime_ns=0 if known_as else status.st_mtime_ns,
            sample=sample(descriptor, status.st_size),
        )
    finally:
        os.close(descriptor)


def _inside(directory: str, path: str) -> str | None:
    """The path from the scratch directory on, or None for a file elsewhere."""
    start = directory.rstrip("/") + "/"
    rest = path.removeprefix(start)
    plain = all(part not in ("", ".", "..") for part in rest.split("/"))
    return rest if path.startswith(start) and plain else None


def _sha256(descriptor: int) -> str:
    import hashlib

    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    offset = 0
    while count := os.preadv(descriptor, [buffer], offset):
        digest.update(view[:count])
        offset += count
    return digest.hexdigest()


def _hypervisor(domain_type: str) -> str:
    return {"kvm": "KVM", "qemu": "emulation (TCG)", "xen": "Xen"}.get(domain_type, domain_type)


def _version(number: int) -> str:
    return f"{number // 1000000}.{number // 1000 % 1000}.{number % 1000}"
