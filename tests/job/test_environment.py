"""The environment of a job, as HTCondor writes it into an ad."""

import pytest

from tests.jobs import of_lines
from vmgahp.errors import JobFault
from vmgahp.job.run import read_environment


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("  ", {}),
        ("A=1", {"A": "1"}),
        ("A=1 B=2  C=", {"A": "1", "B": "2", "C": ""}),
        ("B=x' 'y", {"B": "x y"}),
        ("B='x y' C=1", {"B": "x y", "C": "1"}),
        ("'B=x y'", {"B": "x y"}),
        ("D=it''''s PATH=/usr/bin:/bin", {"D": "it's", "PATH": "/usr/bin:/bin"}),
        ("D=''", {"D": ""}),
        ("D=a''b", {"D": "ab"}),
        ("D=a=b", {"D": "a=b"}),
        ("A=1 A=2", {"A": "2"}),
        (r"A=\n", {"A": r"\n"}),
    ],
)
def test_the_newer_form(text: str, found: dict[str, str]) -> None:
    assert read_environment(of_lines(f'Environment = "{text}"')) == found


@pytest.mark.parametrize("text", ["A='", "A='''", "A=1 '", "A", "=1", "A=1 B"])
def test_what_is_not_of_that_form(text: str) -> None:
    with pytest.raises(JobFault, match="not of the form") as caught:
        read_environment(of_lines(f'Environment = "{text}"'))
    assert text in caught.value.problem


def test_the_older_form_counts_where_the_newer_is_not_there() -> None:
    assert read_environment(of_lines('Env = "A=x y; B=it\'s"')) == {"A": "x y", "B": "it's"}
    assert read_environment(of_lines('Env = "A=1|B=;"', 'EnvDelim = "|"')) == {"A": "1", "B": ";"}
    assert read_environment(of_lines('Env = "A=1"', 'Environment = ""')) == {}
    assert read_environment(of_lines()) == {}


def test_a_long_one_takes_no_time_that_grows_with_its_square() -> None:
    text = "A='" + "''" * 500_000 + "' B=1"
    assert len(read_environment(of_lines(f'Environment = "{text}"'))["A"]) == 500_000
