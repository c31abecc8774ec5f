"""What is kept of a job ad, however its lines come."""

import pytest

from vmgahp.protocol.ad_lines import MAX_AD, MAX_AD_LINES, AdLines
from vmgahp.protocol.session import Session
from vmgahp.protocol.wire import TOO_LONG
from vmgahp.text import PRIVATE_ATTRIBUTES, PRIVATE_PREFIX

LINES = [b"A = 1", b'B = "x = y"', b"C=3", b'Args = "CLASSAD_END"', b'Owner = "nobody"']
ODD = [
    b"",
    b"no equals sign",
    b"= nothing",
    b" \t= nothing",
    b" Led = 1",
    b"Nul = \0",
    "Umlaut = ä".encode(),
    b"\xff = 1",
    b'ClaimId = "secret"',
    b' cLaImId="secret"',
    b'_Condor_PrivX = "secret"',
    "trans\N{LATIN SMALL LETTER F}er\N{KELVIN SIGN}ey = secret".encode(),
    b"Claim = 1",
    b"Two = \\\nclaimid = 1",
    b"ClaimId = \\\nsecret",
    b'Text = "ClaimId = 5"',
    TOO_LONG,
]


def taken(lines: list[bytes]) -> tuple[list[bytes], bool, list[str]]:
    """What is kept of lines, whether that is all, and what is said of the rest."""
    ad, said = AdLines(), list[str]()
    for line in lines:
        ad.take(line)
    ad.tell_skipped(said.append)
    return ad.lines, ad.complete, said


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_an_odd_line_is_kept_as_it_is_or_not_at_all(odd: bytes) -> None:
    lines = [*LINES, odd, *LINES]
    assert taken(lines)[0] in ([*LINES, *LINES], lines)
    assert b"secret" not in b"".join(taken(lines)[0])


@pytest.mark.parametrize("name", [*sorted(PRIVATE_ATTRIBUTES), PRIVATE_PREFIX, PRIVATE_PREFIX + "ate"])
@pytest.mark.parametrize("change", [str.lower, str.upper, str.title])
def test_no_secret_is_kept(name: str, change: "type[str]") -> None:
    assert taken([*LINES, f"{change(name)} = 1".encode()])[0] == LINES


def test_the_limit_of_lines_is_for_those_that_are_kept() -> None:
    kept, complete, said = taken([b"bad", *[b"A = 1"] * (MAX_AD_LINES + 1)])
    assert (len(kept), complete) == (MAX_AD_LINES, False)
    assert [line.split(" of ")[0] for line in said] == ["skipped 1 bad lines", "skipped 1 attributes"]


def test_the_limit_of_bytes_is_for_all_that_come() -> None:
    long = b"A = " + b"x" * (1 << 20)
    kept, complete, _ = taken([long] * 20)
    assert (sum(map(len, kept)) <= MAX_AD, complete) == (True, False)
    assert len(kept) == MAX_AD // len(long)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_what_follows_the_ad_in_the_same_bytes_is_read_too(size: int) -> None:
    made = Session("kvm", lambda _text: None, lambda _text: None)
    data = b"VERSION\r\nCLASSAD\r\n" + b"\r\n".join(
        [*LINES, b'ClaimId = "secret"', b"classad_end", b"VERSION", b"SUPP"]
    )
    for start in range(0, len(data), size):
        made.receive(data[start : start + size], 0.0)
    made.receive(b"ORT_VMS\r\nVERSION\r\n", 0.0)
    version, *lines = made.take_output().split(b"\n")
    assert lines == [b"S", b"S", version, b"S xen kvm", version, b""]
    assert made._ad is not None
    assert made._ad.lines == LINES
