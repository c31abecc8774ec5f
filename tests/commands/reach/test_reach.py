"""``vmgahp ssh``, ``view`` and ``attach``, with stand-ins for HTCondor's programs and for ssh."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peer import VMGAHP
from vmgahp.commands.reach import _of_text, on_node
from vmgahp.errors import ClientFault

AD = """JobStatus = 2
RemoteHost = "slot1_2@node7.example"
GlobalJobId = "submit.example#12.0#1700000000"
VMPARAM_vm_SSH = true
JobVMVNCConsole = true
StartdIpAddr = "<198.51.100.7:9618?addrs=198.51.100.7-9618+[2001-db8--7]-9618&alias=node7.example&noUDP&sock=startd>"
"""
SAYS = """#!{python}
import json, sys
json.dump(sys.argv, open({place!r} + "/" + sys.argv[0].rpartition("/")[2] + ".argv", "w"))
"""


class Site:
    """A submit machine: a directory of programs, and what they were called with."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.environ = {"PATH": f"{place}:/usr/bin:/bin", "HOME": str(place)}

    def program(self, name: str, text: str = "") -> None:
        path = self.place / name
        path.write_text(SAYS.format(python=sys.executable, place=str(self.place)) + text)
        path.chmod(0o755)

    def queue(self, *lines: str) -> None:
        self.program("condor_q", f"print({AD + chr(10).join(lines)!r})")

    def node(self, **files: object) -> None:
        """condor_ssh_to_job, by which these files are read."""
        texts = {f"{name}.json": json.dumps(value) for name, value in files.items()}
        self.program("condor_ssh_to_job", f"print('Welcome'); print({texts!r}.get(sys.argv[-1], ''))")

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        environ = os.environ | self.environ
        return subprocess.run([*VMGAHP, *words], env=environ, capture_output=True, text=True, timeout=60, input="\n")

    def called(self, name: str) -> list[str]:
        words = json.loads((self.place / f"{name}.argv").read_text())
        assert isinstance(words, list)
        return words[1:]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    made.program("ssh")
    made.node()
    made.queue(
        'ChirpVMSSH = "22=127.0.0.1:22017 8080=0.0.0.0:22018 9=198.51.100.7:22019 7=[::1]:22020 '
        '6=203.0.113.9:22 5=[::ffff:127.0.0.1]:22 4=[2001:db8::7]:22021 3=[::ffff:0.0.0.0]:22022"'
    )
    return made


ALIAS = ["-o", "HostKeyAlias=vm-submit.example-12.0-1700000000", "-o", "CheckHostIP=no"]


def proxy(place: str) -> list[str]:
    return ["-o", f"ProxyCommand=condor_ssh_to_job -ssh 'ssh -W {place}' 12.0"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["12.0"], [*ALIAS, *proxy("127.0.0.1:22017"), "-p", "22017", "--", "127.0.0.1"]),
        (
            ["-l", "debian", "12.0", "ls", "-l"],
            [*ALIAS, *proxy("127.0.0.1:22017"), "-p", "22017", "-l", "debian", "--", "127.0.0.1", "ls", "-l"],
        ),
        (["-p", "8080", "12.0"], [*ALIAS, "-p", "22018", "--", "node7.example"]),
        (["-p", "9", "12.0"], [*ALIAS, "-p", "22019", "--", "198.51.100.7"]),
        (["-p", "9", "--by-node", "12.0"], [*ALIAS, *proxy("198.51.100.7:22019"), "-p", "22019", "--", "198.51.100.7"]),
        (["-p", "7", "12.0"], [*ALIAS, *proxy("[::1]:22020"), "-p", "22020", "--", "::1"]),
        (["-p", "6", "12.0"], [*ALIAS, *proxy("203.0.113.9:22"), "-p", "22", "--", "203.0.113.9"]),
        (["-p", "5", "12.0"], [*ALIAS, *proxy("127.0.0.1:22"), "-p", "22", "--", "127.0.0.1"]),
        (["-p", "4", "12.0"], [*ALIAS, "-p", "22021", "--", "2001:db8::7"]),
        (["-p", "3", "12.0"], [*ALIAS, "-p", "22022", "--", "node7.example"]),
    ],
)
def test_ssh_gets_in_by_the_job_ad(site: Site, words: list[str], expected: list[str]) -> None:
    ended = site.run("ssh", *words)
    assert ended.returncode == 0, ended.stderr
    assert site.called("condor_q") == ["-l", "12.0"]
    assert site.called("ssh") == expected


def test_where_the_ad_does_not_say_the_machine_is_asked(site: Site) -> None:
    site.queue()
    site.node(vm_access={"ssh": [{"guest_port": 22, "address": "127.0.0.1", "port": 22017}]})
    ended = site.run("ssh", "12.0")
    assert ended.returncode == 0, ended.stderr
    read_keys = ["grep", "-a", "-A9", "BEGIN.SSH.HOST.KEY.KEYS", "vm_console.log"]
    assert site.called("condor_ssh_to_job") == ["12.0", *read_keys]
    assert site.called("ssh")[-3:] == ["22017", "--", "127.0.0.1"]


@pytest.mark.parametrize(
    "said", ["-oProxyCommand=id:22", "127.0.0.1:0", "127.0.0.1:99999", "127.0.0.1;id:22", "::::::1:22"]
)
def test_an_ad_that_says_nonsense_is_no_option_of_ssh(said: str) -> None:
    assert _of_text(f"22={said}") == _of_text("x") == {}


SCOPED = {"ssh": [{"guest_port": 22, "address": "fe80::1%h';id;'", "port": 22017}]}
"""The scope of an IPv6 address may be any text."""


@pytest.mark.parametrize(
    "said", [None, [], {"ssh": 3}, {"ssh": [{"guest_port": 22}]}, {"ssh": [{"port": "-o"}]}, SCOPED]
)
def test_a_file_that_says_nonsense_is_a_sentence(site: Site, said: object) -> None:
    site.queue()
    site.node(vm_access=said)
    ended = site.run("ssh", "12.0")
    assert ended.returncode == 1
    assert ended.stderr.startswith("vmgahp ssh: vm_access.json of job 12.0 ")


@pytest.mark.parametrize("job", ["-oProxyCommand=id", "12.0;id", "x", ""])
def test_only_a_job_id_is_one(job: str) -> None:
    with pytest.raises(ClientFault, match="not a job id"):
        on_node(job, "cat", "x")


def test_the_console_is_followed_and_a_guest_cannot_use_the_terminal(site: Site) -> None:
    assert site.run("attach", "12.0").returncode == 0
    assert site.called("condor_ssh_to_job") == ["12.0", "tail", "-n", "+1", "-F", "vm_console.log"]
    text = "a\\x1b]0;title\\x07\\x1b[31mred\\x9b2J\\u202ex\\x08\\r\\n\\tü"
    said = f'for each in (sys.stdout, sys.stderr): each.buffer.write("{text}".encode() + bytes([0xFF]))\nsys.exit(3)'
    site.program("condor_ssh_to_job", said)
    ended = site.run("attach", "12.0")
    assert ended.stdout == "a]0;title[31mred2Jx\n\tü\N{REPLACEMENT CHARACTER}"
    assert ended.stderr.startswith(ended.stdout)
    assert ended.returncode == 3


TUNNEL = """
import socket, time
if "-ssh" in sys.argv:
    words = sys.argv[sys.argv.index("-ssh") + 1]
    server = socket.create_server(("127.0.0.1", int(words.split("127.0.0.1:")[1].partition(":")[0])))
    time.sleep(60)
print(json.dumps({"host": "127.0.0.1", "port": 5901, "password": "secret12"}))
"""


@pytest.mark.parametrize("viewer", ["remote-viewer", "vncviewer"])
def test_a_viewer_shows_the_display_and_no_command_line_has_the_password(site: Site, viewer: str) -> None:
    site.program("condor_ssh_to_job", TUNNEL)
    site.program(
        viewer,
        "import os; said = os.environ.get('VNC_PASSWORD') or open(sys.argv[1]).read()\n"
        f"open({str(site.place)!r} + '/said', 'w').write(said)",
    )
    ended = site.run("view", "12.0")
    assert ended.returncode == 0, ended.stderr
    assert "secret12" in (site.place / "said").read_text()
    assert not [word for word in site.called(viewer) if "secret12" in word]
    tunnel = site.called("condor_ssh_to_job")
    assert tunnel[0] == "-ssh"
    assert tunnel[1].endswith(":127.0.0.1:5901")
    assert tunnel[2] == "12.0"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_port_that_another_user_has_taken_gets_no_viewer(site: Site) -> None:
    site.program(
        "condor_ssh_to_job",
        TUNNEL.replace("    server =", "    os.setuid(54321)\n    server =")
        .replace("import socket", "import os, socket")
        .replace("sleep(60)", "sleep(3)"),
    )
    site.program("remote-viewer")
    ended = site.run("view", "12.0")
    assert ended.returncode == 1
    assert "no way to the display" in ended.stderr
    assert not (site.place / "remote-viewer.argv").exists()


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA" + "b" * 44


def test_the_image_and_the_console_say_who_and_which_key(site: Site) -> None:
    """The key of an earlier boot is not the guest's any more."""
    site.queue('ChirpVMSSH = "22=198.51.100.7:22019"', 'VMPARAM_vm_Disk = "catalog:debian-12:vda:w"')
    site.program("condor_ssh_to_job", f"print('{KEY.replace('b', 'c')} root@old\\n<14>{KEY} root@vm')")
    assert site.run("ssh", "12.0", "uptime").returncode == 0
    words = site.called("ssh")
    assert f"KnownHostsCommand=/bin/echo vm-submit.example-12.0-1700000000 {KEY}" in words
    assert "StrictHostKeyChecking=yes" in words
    assert words[-6:] == ["22019", "-l", "debian", "--", "198.51.100.7", "uptime"]
    site.run("ssh", "-l", "me", "12.0")
    assert "debian" not in site.called("ssh")


@pytest.mark.parametrize("command", ["ssh", "view", "attach"])
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("JobStatus = 2", 'JobStatus = 5\nHoldReason = "no disk"', "job 12.0 is held: no disk."),
        ('RemoteHost = "slot1_2@node7.example"\n', "", "job 12.0 does not run. Hint: wait"),
        ("JobStatus = 2", "JobUniverse = 5", "job 12.0 is not a VM job."),
        ("JobStatus = 2\n", None, "the queue has no job 12.0. Hint: condor_history"),
    ],
    ids=["held", "idle", "vanilla", "gone"],
)
def test_a_job_that_cannot_be_reached_is_told_by_its_ad(
    site: Site, command: str, old: str, new: str | None, said: str
) -> None:
    site.program("condor_q", f"print({AD.replace(old, new) if new is not None else ''!r})")
    ended = site.run(command, "12.0")
    assert (ended.returncode, said in ended.stderr) == (1, True), ended.stderr
    assert not (site.place / "condor_ssh_to_job.argv").exists()


def test_a_job_that_asks_for_neither_is_told_what_to_ask_for(site: Site) -> None:
    site.program("condor_q", f"print({AD.replace('= true', '= false')!r})")
    assert "Hint: submit it with vm_networking = true" in site.run("ssh", "12.0").stderr
    assert "Hint: submit it with vm_vnc = true" in site.run("view", "12.0").stderr


def test_a_machine_without_sshd_is_named(site: Site) -> None:
    site.program("condor_ssh_to_job", "sys.exit('Failed to create ssh key x with command /usr/bin/ssh-keygen')")
    for command in ("view", "attach"):
        assert "needs openssh-server, ssh-keygen" in site.run(command, "12.0").stderr


def test_a_display_that_is_not_there_yet_is_a_sentence(site: Site) -> None:
    ended = site.run("view", "12.0")
    assert (ended.returncode, ended.stderr.partition(":")[0]) == (1, "vmgahp view")
    assert "Hint: " in ended.stderr
