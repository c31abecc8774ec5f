"""Link the first mention of HTCondor's commands, settings and submit commands on a page to HTCondor's manual.

The tables are from the source of that manual, August 2026; other names have no link, because nothing is fetched while
the documents are built. Names of this project's reference link there instead.
"""

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

BASE = "https://htcondor.readthedocs.io/en/latest/"

COMMANDS = """
condor_chirp condor_config_val condor_continue condor_dagman condor_drain condor_gpu_discovery condor_history
condor_hold condor_job_router_info condor_master condor_off condor_on condor_ping condor_preen condor_q condor_qedit
condor_reconfig condor_release condor_restart condor_rm condor_ssh_to_job condor_status condor_submit
condor_submit_dag condor_suspend condor_tail condor_token_create condor_top condor_transfer_data
condor_update_machine_ad condor_urlfetch condor_vacate condor_vacate_job condor_version condor_wait condor_watch_q
condor_who
"""
"""The commands, each with a manual page."""

SETTINGS = {
    "global": "CCB_ADDRESS EXECUTE RESERVED_DISK",
    "negotiator": "NEGOTIATOR_CONSIDER_PREEMPTION NEGOTIATOR_INTERVAL",
    "schedd": "BYTES_REQUIRED_TO_QUEUE_FOR_TRANSFER CURB_MATCHMAKING FILE_TRANSFER_DISK_LOAD_THROTTLE "
    "MAX_CONCURRENT_DOWNLOADS MAX_CONCURRENT_UPLOADS MAX_CONCURRENT_UPLOADS_PER_USER MAX_JOBS_RUNNING "
    "SYSTEM_PERIODIC_HOLD SYSTEM_PERIODIC_HOLD_NAMES SYSTEM_PERIODIC_HOLD_REASON",
    "shadow": "SHADOW_QUEUE_UPDATE_INTERVAL",
    "shared_port": "SHARED_PORT_PORT",
    "ssh_to_job": "ENABLE_SSH_TO_JOB",
    "startd": "MachineMaxVacateTime PERIODIC_CHECKPOINT STARTD_ADDRESS_FILE STARTD_NOCLAIM_SHUTDOWN UPDATE_INTERVAL "
    "UPDATE_OFFSET WANT_SUSPEND",
    "starter": "ASSIGN_CPU_AFFINITY CHIRP_DELAYED_UPDATE_PREFIX ENABLE_CHIRP ENABLE_CHIRP_DELAYED FILETRANSFER_PLUGINS "
    "RUN_FILETRANSFER_PLUGINS_WITH_ROOT STARTER_UPDATE_INTERVAL USER_JOB_WRAPPER",
}
"""Page of the manual -> HTCondor's settings on it that these documents name."""

SUBMIT_COMMANDS = """
cron_minute deferral_time job_ad_information_attrs max_retries on_exit_hold on_exit_hold_reason
on_exit_remove periodic_hold periodic_remove request_cpus request_disk request_memory success_exit_code
transfer_input_files transfer_output_files transfer_output_remaps vm_checkpoint vm_disk vm_macaddr vm_memory
vm_networking vm_networking_type vm_no_output_vm vm_type when_to_transfer_output xen_initrd xen_kernel
"""

PLACES = (
    {name: f"{BASE}man-pages/{name}.html" for name in COMMANDS.split()}
    | {
        name: f"{BASE}admin-manual/configuration/{page}.html#{name}"
        for page, names in SETTINGS.items()
        for name in names.split()
    }
    | {name: f"{BASE}man-pages/htcondor-jdl.html#{name}" for name in SUBMIT_COMMANDS.split()}
)
"""Name -> its place in HTCondor's manual."""


def _link(app: Sphinx, document: nodes.document) -> None:
    page = app.env.current_document.docname
    if page.startswith("man/"):
        return
    seen: set[str] = set()
    for literal in list(document.findall(nodes.literal)):
        words = literal.astext().split()
        if not words or words[0] not in PLACES or words[0] in seen:
            continue
        if isinstance(literal.parent, nodes.reference | nodes.title | addnodes.pending_xref):
            continue
        seen.add(words[0])
        link = nodes.reference("", "", refuri=PLACES[words[0]], internal=False)
        link["reftitle"] = f"{words[0]} in HTCondor's manual"
        literal.replace_self(link)
        link += literal


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", _link)
    return {"parallel_read_safe": True}
