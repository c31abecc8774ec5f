"""The requests to a hypervisor script, and the answers that count."""

import json

import pytest

from tests import jobs
from vmgahp.drivers.script import protocol
from vmgahp.drivers.script.protocol import Answer, Malformed, ScriptRequest, changed, decode, difference

AD = jobs.of_lines(
    *("JobVMMemory = 512", "RequestMemory = JobVMMemory", 'User = "alice@lab"'),
    *('ClaimId = "<1.2.3.4:5>#1#2#secret"', 'Note = "say \\"hi\\""'),
)


def test_the_ad_is_on_standard_input_without_its_secrets() -> None:
    text = protocol.ad_text(AD).decode()
    assert 'User = "alice@lab"\n' in text
    assert "secret" not in text
    assert text.endswith("\n\n")
    assert protocol.ad_text(None) == b"\n"


def test_the_request_is_json_with_the_values_of_the_ad_and_in_the_environment_too() -> None:
    request = ScriptRequest("start", "toy", key="vmgahp-1", memory_mib=64, restart=True)
    document = json.loads(request.document(AD))
    assert (document["action"], document["key"]) == ("start", "vmgahp-1")
    assert document["restart"] is True
    assert (document["ad"]["RequestMemory"], document["ad"]["Note"]) == (512, 'say "hi"')
    assert "ClaimId" not in document["ad"]
    assert json.loads(request.document(None))["ad"] is None
    variables = ScriptRequest("destroy", "toy", key="vmgahp-1", memory_mib=64, keep=True).environment()
    expected = {"VMGAHP_ACTION": "destroy", "VMGAHP_MEMORY_MIB": "64", "VMGAHP_KEEP": "1"}
    assert expected.items() <= variables.items()
    assert variables["VMGAHP_RESTART"] == ""
    assert variables["VMGAHP_UUID"] == "", "there and empty, so that a script with set -u can ask"


@pytest.mark.parametrize(
    ("output", "status", "outcome"),
    [
        (b"", 0, "done"), (b"{}", 0, "done"), (b'{"outcome": "Done"}', 0, "done"),
        (b'Outcome = "rejected"\nReason = "no"', 0, "rejected"),
        (b'{"outcome": "not_implemented"}', 0, "not implemented"), (b"", 65, "rejected"), (b"", 69, "not implemented"),
        (b'{"outcome": "rejected"}', 65, "rejected"),
    ],
)  # fmt: skip
def test_the_outcome_is_told_by_word_or_by_exit_status(output: bytes, status: int, outcome: str) -> None:
    assert decode("start", output, status).outcome == outcome


def test_a_rejection_may_be_a_plain_sentence_and_both_forms_of_an_answer_say_the_same() -> None:
    assert decode("start", b"the disk = what?\n", 65).reason == "the disk = what?"
    assert decode("start", b'{"reason": "no disk"}', 65).reason == "no disk"
    expected = Answer("done", "", {"state": "running", "pid": 7, "cpu_seconds": 1.5, "ip": "10.0.0.2"}, {})
    assert decode("status", b'{"state": "Running", "pid": 7, "cpu_seconds": 1.5, "ip": "10.0.0.2"}', 0) == expected
    lines = b'State = "running"\nPID = 7\n\nCPU_Seconds = 1.5\nip = "10.0.0.2"\n'
    assert decode("status", lines, 0) == expected
    assert decode("probe", b'{"actions": ["pause", "unpause"]}', 0).get("actions") == ["pause", "unpause"]
    assert decode("probe", b'Actions = "pause, unpause"', 0).get("actions") == ["pause", "unpause"]


def test_what_is_no_word_of_an_answer_is_an_attribute_where_there_are_some() -> None:
    assert decode("probe", b'Version = "7.0"\nCores = 8', 0).attributes == {"Cores": 8}
    assert decode("probe", b'{"attributes": {"cores": 8, "gpu": false}}', 0).attributes == {"cores": 8, "gpu": False}
    assert decode("start", b'Outcome = "modified"\nJobVMMemory = 256', 0).attributes == {"JobVMMemory": 256}


@pytest.mark.parametrize(
    ("action", "output", "status", "what"),
    [
        ("start", b"started\n", 0, "neither JSON"),
        ("start", b"", 1, "exit status 1"),
        ("start", b"", -9, "signal 9"),
        ("start", b"\xff\xfe", 0, "UTF-8"),
        ("start", b'{"id": "a"', 0, "not JSON"),
        ("start", b'{"id": "a", "id": "b"}', 0, "twice"),
        ("start", b'{"outcome": "maybe"}', 0, "none of done"),
        ("start", b'{"outcome": "done"}', 65, "exit status says"),
        ("start", b'{"color": "green"}', 0, "means nothing"),
        ("start", b'{"pid": "7"}', 0, "no integer"),
        ("start", b'{"id": "a\\u0007b"}', 0, "no text"),
        ("start", b'{"outcome": "modified"}', 0, "only a start"),
        ("start", b'{"attributes": {"JobVMMemory": 1}}', 0, "with attributes"),
        ("start", b'{"outcome": "modified", "attributes": {"a b": 1}}', 0, "not a name"),
        ("start", b'{"outcome": "modified", "attributes": {"a": [1]}}', 0, "neither a string"),
        ("pause", b'{"outcome": "modified", "attributes": {"a": 1}}', 0, "with attributes"),
        ("status", b"", 0, "what state"),
        ("status", b'{"state": "fine"}', 0, "no state"),
        ("status", b'{"state": "running", "cpu_seconds": NaN}', 0, "NaN"),
        ("status", b'{"state": "running", "cpu_seconds": 1e400}', 0, "no number"),
        ("status", b"State = 1 + 1", 0, "no literal"),
        ("checkpoint", b'{"files": [1]}', 0, "no list"),
        ("probe", b"[" * 100000, 0, "neither JSON"),
        ("probe", b'{"attributes": ' * 20000, 0, "not JSON"),
    ],
)
def test_what_cannot_be_understood_is_no_answer(action: str, output: bytes, status: int, what: str) -> None:
    with pytest.raises(Malformed, match=what):
        decode(action, output, status)


def test_a_changed_ad_and_the_difference() -> None:
    ad = changed(AD, {"jobvmmemory": 256, "Extra": 'a "b"', "Flag": True})
    assert (ad.integer("JobVMMemory"), ad.string("Extra"), ad.string("User")) == (256, 'a "b"', "alice@lab")
    assert ad.boolean("Flag") is True
    found = difference(AD, {"JobVMMemory": 256, "Flag": True, "User": "alice@lab"})
    assert found == ["+ Flag = true", "- JobVMMemory = 512", "+ JobVMMemory = 256"]


@pytest.mark.parametrize("name", ["User", "ClusterId", "vm_working_dir", "JobVMType", "ClaimId", "TransferKey"])
def test_whose_job_it_is_cannot_be_changed(name: str) -> None:
    with pytest.raises(Malformed, match=name):
        changed(AD, {name: "other"})
