"""Transcripts are read and written without loss, and played in step."""

from vmgahp import transcript

TEXT = "< hello\n> A\n< S\n< R\n>   B\n> \n< E\nexit 0\n"


def test_parse_and_render_are_inverse() -> None:
    assert transcript.render(transcript.parse(TEXT)) == TEXT


def test_spaces_that_were_sent_are_kept() -> None:
    assert transcript.parse(TEXT).sent() == ["A", "  B", ""]


def test_play_sends_each_line_and_returns_what_was_heard() -> None:
    sent: list[bytes] = []
    replies = iter([["hello"], ["S", "R"], [], ["E"]])
    heard = transcript.play(transcript.parse(TEXT), sent.append, lambda _count: next(replies))
    assert sent == [b"A\r\n", b"  B\r\n", b"\r\n"]
    assert heard.received() == transcript.parse(TEXT).received()
