"""The names in a job's scratch directory that belong to HTCondor or this daemon.

Such a file is neither an input nor an output of the job: guests need not see it, and must not replace it.
"""

_BEGINNINGS = (
    *(".chirp", ".condor", ".docker", ".job", ".machine.ad", ".update.ad", "_condor_", "condor_exec", "docker_std"),
    ".vm_",
)
"""The prefixes of HTCondor's files, and of our temporary files."""

_OURS = frozenset(
    (
        "vm_access.json",
        "vm_catalog.json",
        "vm_checkpoint.json",
        "vm_checkpoint.mem",
        "vm_choice.json",
        "vm_choice.vmx",
        "vm_cidata.iso",
        "vm_console.log",
        "vm_data_files.iso",
        "vm_error.txt",
        "vm_exit.json",
        "vm_metrics.jsonl",
        "vm_outputs",
        "vm_outputs.tar",
        "vm_policy.txt",
        "vm_run.json",
        "vm_run.tar",
        "vm_run_state.txt",
        "vm_screenshot.png",
        "vm_screenshot.ppm",
        "vm_stderr",
        "vm_stdout",
        "vm_suspend.mem",
        "vm_vnc.json",
    )
)


def is_reserved(name: str) -> bool:
    """Return True if a name at the top of a scratch directory, or the first part of a path, is not the job's."""
    top = name.partition("/")[0]
    ours = ".".join(top.split(".")[:2])  # vm_checkpoint.json.refused-1 counts as vm_checkpoint.json
    return ours in _OURS or top.startswith(_BEGINNINGS) or top == "lost+found"
